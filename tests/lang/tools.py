"""Functions that a server offers to registered programs, in tests."""

from __future__ import annotations


async def shout(text: str) -> str:
    """Louder."""
    return text.upper() + "!"


def fail(text: str) -> str:
    """Not at all."""
    raise OSError(f"no {text}")
