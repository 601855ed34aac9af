"""Compiled kernels for CPUs: quantised linear maps and the whole forward in one call (csrc/)."""
