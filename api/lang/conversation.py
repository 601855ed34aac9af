"""What a state holds: its turns as text with places of generated tokens, and those tokens as ids.

Generated tokens are never encoded again: the server is asked for the pieces around them, and
pieces once used must stay what they were. Knows no server.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from spec_serve.api import messages as m
from spec_serve.lang.parts import ProgramError, Role

Parts = list[str | None]
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Question(Struct, frozen=True, omit_defaults=True):
    """What is to be tokenised; fields as of messages.Tokenize."""

    text: Parts | None = None
    turns: list[m.Turn] | None = None
    begun: Parts | None = None

    @property
    def key(self) -> bytes:
        """Equal for equal questions."""
        return _encode(self)


class Conversation:
    """Append-only. fills: the generated tokens, in order of their places."""

    def __init__(self) -> None:
        self.turns: list[m.Turn] = []
        self.raw: Parts = []
        self.begun: Parts | None = None  # the open turn's
        self.fills: list[list[int]] = []
        self.pieces: list[list[int]] = []  # before each of the fills
        self.cuts: list[int] = []  # how many ids at each piece's end the fill has written anew
        self.said: list[str] = []  # texts of the fills

    def copy(self) -> Conversation:
        """Independent of this one from here on."""
        made = Conversation()
        made.turns, made.raw = list(self.turns), list(self.raw)
        made.begun = None if self.begun is None else list(self.begun)
        made.fills, made.pieces = list(self.fills), list(self.pieces)
        made.said, made.cuts = list(self.said), list(self.cuts)
        return made

    def open(self, role: Role) -> None:
        """Begin a turn, or raw text (role ""). Raises ProgramError where both would mix."""
        mixed = "raw text and turns can't be mixed in one state; write the text into a turn"
        if role == "":
            if self.turns:
                raise ProgramError(mixed)
            return
        if self.raw:
            raise ProgramError(mixed)
        self.begun = []

    def close(self, role: Role) -> None:
        """End the turn."""
        if role and self.begun is not None:
            self.turns.append(m.Turn(role, self.begun))
            self.begun = None

    def add(self, text: str) -> None:
        """Text behind what is there."""
        parts = self.raw if self.begun is None else self.begun
        if not text:
            return
        if parts and isinstance(parts[-1], str):
            parts[-1] += text
        else:
            parts.append(text)

    def fill(self, ids: list[int], text: str, piece: list[int], cut: int = 0) -> None:
        """Generated tokens behind what is there, and the piece they were generated behind.

        cut: ids at the piece's end that they begin with in other words (healing.py).
        """
        parts = self.raw if self.begun is None else self.begun
        parts.append(None)
        self.pieces.append(piece)
        self.cuts.append(cut)
        self.fills.append(ids)
        self.said.append(text)

    @property
    def tail(self) -> str:
        """The text behind the last fill, as far as the open turn has it."""
        parts = self.raw if self.begun is None else self.begun
        return parts[-1] or "" if parts else ""

    def question(self, more: str = "", less: int = 0) -> Question:
        """What stands around the fills now, with more text at its end, or so much less."""
        if self.turns or self.begun is not None:
            begun = None if self.begun is None else _joined(self.begun, more, less)
            return Question(turns=list(self.turns), begun=begun)
        return Question(text=_joined(self.raw, more, less))

    def prompt(self, pieces: list[list[int]], cut: int = 0) -> list[int]:
        """All ids, the last piece but `cut` of its ids included.

        Raises ProgramError if earlier pieces have changed.
        """
        if pieces[:-1] != self.pieces:
            raise ProgramError(
                "the model's chat template writes earlier turns differently once others follow, "
                "so that what was generated can't be kept; begin a new state instead"
            )
        return self.ids + pieces[-1][: len(pieces[-1]) - cut]

    @property
    def ids(self) -> list[int]:
        """Up to the last generated token."""
        return [
            token
            for piece, cut, fill in zip(self.pieces, self.cuts, self.fills, strict=True)
            for token in (*piece[: len(piece) - cut], *fill)
        ]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as a chat has them."""
        texts = iter(self.said)
        return [{"role": turn.role, "content": _text(turn.parts, texts)} for turn in self.turns]

    @property
    def text(self) -> str:
        """Of raw text all, else of the last turn."""
        if self.turns:
            return self.messages[-1]["content"]
        return _text(self.raw, iter(self.said))


def _text(parts: Parts, texts: Iterator[str]) -> str:
    return "".join(next(texts) if part is None else part for part in parts)


def _joined(parts: Parts, more: str, less: int = 0) -> Parts:
    if less:
        last = parts[-1] or ""
        return [*parts[:-1], last[:-less]]
    if not more:
        return list(parts)
    if parts and isinstance(parts[-1], str):
        return [*parts[:-1], parts[-1] + more]
    return [*parts, more]
