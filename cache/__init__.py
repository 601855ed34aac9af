"""Tokens, slots and trees: the verified history and the twigs growing on it.

This folder knows token ids, slot numbers and the tensors that hold K and V per slot. It knows
nothing of models, drafters, requests or protocols, and it imports no other folder.
"""
