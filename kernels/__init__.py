"""Attention and the other hot operations: tensors in, tensors out.

This folder knows how to compute on a given device, and holds the torch reference that specifies
every fast path. It knows nothing of models, requests or which drafter is running.
"""
