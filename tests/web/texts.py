"""Long texts that both a test and the server process it starts know."""

WORDS = "The quick brown fox jumps over the lazy dog. "


def long_text(size: int) -> str:
    """What the engine answers to "long SIZE"."""
    line = f"{WORDS * 5}\n\n"
    return (line * (size // len(line) + 1))[:size]
