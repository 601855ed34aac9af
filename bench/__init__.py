"""Benches: what this project measures. Each module has `main(argv)`, prints a table, writes JSON.

Stands to the right of everything: it may import all folders and none imports it.
"""
