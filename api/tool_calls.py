"""Tool calls in a model's text: found while it streams, whatever pieces it comes in.

`parser_for` picks the family's format (api/tool_formats.py) by the chat template; `ToolParser`
splits the text into what the user reads and the calls' names and arguments. Pieces depend on the
text alone, not on where it was cut: every character takes the same way. Knows no wire format.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_serve.api.text import StopStrings
from spec_serve.api.tool_formats import TAGGED, Format, format_of
from spec_serve.api.tool_grammars import Grammar
from spec_serve.api.tool_json import SPACE, Malformed, Scan

MAX_SPACE = 64  # white space held back, as it goes where a call follows
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index`. name: on a call's first piece only, else None.

    arguments: the next piece of its JSON. id is the same on all its pieces.
    """

    index: int
    id: str
    name: str | None
    arguments: str


Piece = TextPiece | ToolCallDelta


class ToolParser:
    """One choice's text on its way to the client.

    tools: name -> schema of the parameters. Text that may begin a marker is held back, and so is
    white space, since it is dropped around calls. What turns out to be no call, or one of a name
    not in `tools`, is text. A call's arguments go out as they come: should they turn out broken,
    what was sent stays the call's and the rest is text. `called`: calls begun so far.
    """

    def __init__(self, form: Format, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.form = form
        self.called = 0
        self._tools = tools
        self._markers = StopStrings(form.markers)
        self._initial = re.compile("[" + re.escape("".join(self._markers.initials)) + "]")
        self._state = 0
        self._held = ""  # begins a marker, perhaps
        self._space = ""
        self._fresh = True  # nothing but white space so far
        self._behind = False  # the last thing was a call
        self._reader: Scan[bool] | None = None
        self._raw: list[str] = []  # read by the grammar, not accounted for
        self._id = ""
        self._open = False
        self._made: list[Piece] = []
        self._parts: list[str] = []  # of the piece in the making
        self._first = ""  # the name, if that piece is a call's first
        self._of_call = False

    def push(self, text: str) -> list[Piece]:
        """More text; the pieces that are certain now."""
        at = 0
        while at < len(text):
            if self._reader is not None:
                self._read(text[at])
                at += 1
            elif self._state or self._fresh:
                self._look(text[at])
                at += 1
            else:  # all at once up to where a marker may begin
                begin = self._initial.search(text, at)
                end = begin.start() if begin else len(text)
                self._say(text[at:end])
                if begin:
                    self._look(text[end])
                at = end + 1
        return self._taken()

    def finish(self) -> list[Piece]:
        """The end of the text; what was held back."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            if not self._open:
                self._say(self._unread())
        self._say(self._held)
        if self._space and not self._behind:
            self._piece(of_call=False)
            self._parts.append(self._space)
        self._held = self._space = ""
        self._state = 0
        return self._taken()

    # ------------------------------------------------------------ told by grammars

    def open(self, name: str) -> Mapping[str, Any]:
        """A call begins. Malformed for a name that is no tool."""
        schema = self._tools.get(name)
        if schema is None:
            raise Malformed
        self._space = ""
        self._piece(of_call=True, name=name)
        letters = "".join(secrets.choice(_LETTERS) for _ in range(9))
        self._id = letters if self.form.short_ids else f"call_{secrets.token_hex(12)}"
        self.called += 1
        self._fresh, self._open, self._behind = False, True, True
        self._raw.clear()
        return schema

    def knows(self, name: str) -> bool:
        """Whether this is one of the tools."""
        return name in self._tools

    def write(self, text: str, /) -> None:
        """The next piece of the open call's arguments."""
        if text:
            self._piece(of_call=True)
            self._parts.append(text)
        self._raw.clear()

    def close(self) -> None:
        """The open call is complete."""
        self._open = False
        self._raw.clear()

    # -------------------------------------------------------------------- reading

    def _look(self, char: str) -> None:
        """A character outside of calls."""
        if self._fresh and char in self.form.bare and not self._held:
            self._enter("", self.form.bare[char])
            self._read(char)
            return
        markers = self._markers
        self._state = state = markers.step(self._state, char)
        held = self._held + char
        if marker := markers.ends[state]:
            self._say(held.removesuffix(marker))
            self._held, self._state = "", 0
            self._found(marker)
            return
        keep = len(held) - markers.depth[state]
        self._held = held[keep:]
        self._say(held[:keep])

    def _found(self, marker: str) -> None:
        form = self.form
        if marker in form.openers:
            self._enter(marker, form.openers[marker])
        elif not (self._behind or marker in form.silent):
            self._say(marker)

    def _enter(self, opener: str, grammar: Grammar) -> None:
        self._open = False
        self._raw = [opener]
        self._reader = grammar(self)
        next(self._reader)

    def _read(self, char: str) -> None:
        """A character inside of what may be a call."""
        assert self._reader is not None
        self._raw.append(char)
        try:
            self._reader.send(char)
            return
        except StopIteration as end:
            self._reader = None
            if not end.value:
                self._raw.clear()
                return
            self._raw.pop()
        except Malformed:
            self._reader = None
            self._raw.pop()
        self._open = False
        self._say(self._unread())
        self._look(char)

    def _unread(self) -> str:
        """What a grammar gave up on."""
        text = "".join(self._raw)
        self._raw.clear()
        return text

    # --------------------------------------------------------------------- saying

    def _say(self, text: str) -> None:
        """Text for the user, but for white space at its end."""
        if not text:
            return
        whole = self._space + text
        keep = len(whole.rstrip(SPACE))
        keep = max(keep, len(whole) - MAX_SPACE)
        if keep:
            self._fresh = self._behind = False
            self._piece(of_call=False)
            self._parts.append(whole[:keep])
        self._space = whole[keep:]

    def _piece(self, of_call: bool, name: str = "") -> None:
        """Make sure that the piece in the making is of this kind."""
        if self._parts or self._first:
            if of_call == self._of_call and not name:
                return
            self._cut()
        self._of_call, self._first = of_call, name

    def _cut(self) -> None:
        text = "".join(self._parts)
        if self._of_call:
            self._made.append(ToolCallDelta(self.called - 1, self._id, self._first or None, text))
        elif text:
            self._made.append(TextPiece(text))
        self._parts = []
        self._first = ""

    def _taken(self) -> list[Piece]:
        if self._parts or self._first:
            self._cut()
        made, self._made = self._made, []
        return made


def parser_for(
    chat_template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = "auto",
    only_tagged: bool = False,
) -> ToolParser | None:
    """The parser for one choice of a request; None where no calls are wanted.

    tools: OpenAI's, {"type": "function", "function": {"name", "parameters"}}. tool_choice: "none",
    "auto", "required" or {"type": "function", "function": {"name"}}, which lets only that name
    pass for a call. only_tagged: nothing but what stands in <tool_call> is one.
    """
    if not tools or tool_choice == "none":
        return None
    named = None
    if isinstance(tool_choice, Mapping):
        named = tool_choice.get("function", tool_choice).get("name")
    known: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        name, schema = function.get("name"), function.get("parameters")
        if isinstance(name, str) and named in (None, name):
            known[name] = schema if isinstance(schema, Mapping) else {}
    return ToolParser(TAGGED if only_tagged else format_of(chat_template or ""), known)
