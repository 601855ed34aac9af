"""Text and conversations of programs to ids, where some of the tokens are known as ids already.

Generated tokens are never encoded anew: in their places stand holes, and the pieces around them
come back as ids. Works on the tokenizer in the service's pool; knows no sessions and no programs.
"""

from __future__ import annotations

from typing import Any

from spec_serve.api import messages as m
from spec_serve.api.auth import Principal
from spec_serve.api.convert import TextTokens
from spec_serve.api.limits import CHARS_PER_TOKEN
from spec_serve.api.service import CHARS_ALWAYS, MOST_CHARS_PER_TOKEN, Service
from spec_serve.spec.request import RequestError

# A character no text needs; where a request has it, the next one.
_HOLES = range(0xF8FF, 0xE000, -1)


async def tokenized(service: Service, asked: m.Tokenize, who: Principal) -> list[list[int]]:
    """Ids before, between and behind the holes. Raises RequestError."""
    if (asked.text is None) == (asked.turns is None):
        raise RequestError("turns", "exactly one of text and turns is needed")
    if asked.begun is not None and asked.turns is None:
        raise RequestError("begun", "only stands beside turns")
    parts = [*(asked.text or ()), *(asked.begun or ())]
    for turn in asked.turns or ():
        parts += turn.parts
    size = sum(1 if part is None else len(part) for part in parts) + len(asked.turns or ())
    context = service.link.info.max_context
    most = max(MOST_CHARS_PER_TOKEN * context, CHARS_ALWAYS)
    if size > most:
        told = f"{size} characters; at most {most} are read for a context of {context} tokens"
        raise RequestError("turns", told, "context_length_exceeded")
    tokenizer = service.tokenizer
    with service.admission.reading(who, 1, size // CHARS_PER_TOKEN):
        return await service.aside(lambda: _pieces(asked, tokenizer, parts))


def _pieces(asked: m.Tokenize, tokenizer: TextTokens, parts: list[str | None]) -> list[list[int]]:
    text = "".join(part for part in parts if part is not None)
    try:
        text.encode()
    except UnicodeEncodeError:
        told = "holds half a surrogate pair, which no encoding has"
        raise RequestError("turns", told) from None
    if asked.text is not None:
        return tokenizer.encode_around(_between(asked.text))
    hole = next(chr(code) for code in _HOLES if chr(code) not in text)

    def joined(given: list[str | None]) -> str:
        return "".join(hole if part is None else part for part in given)

    messages: list[dict[str, Any]] = [
        {"role": turn.role, "content": joined(turn.parts)} for turn in asked.turns or ()
    ]
    begun = None if asked.begun is None else joined(asked.begun)
    try:
        return tokenizer.render_around(messages, begun, hole)
    except ValueError as error:
        raise RequestError("turns", str(error)) from None


def _between(parts: list[str | None]) -> list[str]:
    """Texts before, between and behind the Nones."""
    texts = [""]
    for part in parts:
        if part is None:
            texts.append("")
        else:
            texts[-1] += part
    return texts
