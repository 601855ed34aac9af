"""The model that maps a batch of token trees to logits and taps.

This folder knows architectures, checkpoints, tokenisers and where models are found. It knows
nothing of guesses, verification or requests.
"""
