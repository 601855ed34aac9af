"""The tiny tokenizer with the methods of target/tokenizer.py, for tests that load no files.

Renders chats as ChatML without a template engine. Imported by tests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.tiny import SPECIALS, VOCAB, tiny_tokenizer


class TinyTokens:
    """Byte-level; the ids of `tiny_tokenizer`."""

    vocab_size = VOCAB
    bos_id = None
    chat_template: str | None = "ChatML"

    def __init__(self) -> None:
        self._inner = tiny_tokenizer()
        first = VOCAB - len(SPECIALS)
        self._special = {first + i: text for i, text in enumerate(SPECIALS)}
        self.eos_ids = frozenset((first, first + 2))

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        """Ids of text that holds no control tokens."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in self._special)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id].encode()
        symbol = self._inner.id_to_token(token_id)
        if symbol.startswith("<unused"):
            return symbol.encode()
        return bytes(_BYTES[char] for char in symbol)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        start, end = VOCAB - 2, VOCAB - 1
        ids: list[int] = []
        for message in messages:
            head = self.encode(message["role"] + "\n")
            ids += [start, *head, *self.encode(message["content"]), end, *self.encode("\n")]
        return [*ids, start, *self.encode("assistant\n")]


def _alphabet() -> dict[str, int]:
    """GPT-2's bytes as characters, reversed: printable ones stand for themselves."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    pairs = {chr(byte): byte for byte in shown}
    return pairs | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _alphabet()
