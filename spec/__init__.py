"""The engine: scheduling, the step, sampling and verification.

This folder knows requests as rows of tokens and turns verdicts into new tokens. It knows nothing
of transports, text or chat templates.
"""
