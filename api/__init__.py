"""The outside: command line, servers, clients, messages and text.

This folder knows protocols and people. It asks the engine for tokens and never touches tensors
of a model. The messages and the clients import no torch.
"""
