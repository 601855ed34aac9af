"""Guesses: everything that proposes a token tree for the target to verify.

This folder knows drafters and how many nodes are worth their time. It knows nothing of the
engine that verifies the guesses, and no guess of it can change a result.
"""
