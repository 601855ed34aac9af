"""Log-probabilities in OpenAI's two shapes: per token for chats, parallel lists for texts.

Knows the messages' form of them and how tokens are written; no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec_serve.api import messages as m
from spec_serve.api import openai_wire as w

Bytes = Callable[[int], bytes]  # of a token


def shown(data: bytes) -> str:
    """A token's text, or its bytes as OpenAI writes them where they are no text by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat(entries: Sequence[m.Logprob], token_bytes: Bytes) -> w.ChatLogprobs:
    """The shape of chat completions."""
    content = []
    for entry in entries:
        top = []
        for token, logprob, _ in entry.top:
            data = token_bytes(token)
            top.append(w.TopLogprob(shown(data), logprob, list(data)))
        data = token_bytes(entry.id)
        content.append(w.TokenLogprob(shown(data), entry.logprob, list(data), top))
    return w.ChatLogprobs(content)


def prompt(entries: Sequence[m.Logprob], token_bytes: Bytes) -> w.PromptLogprobs:
    """vLLM's shape, for the prompt's tokens; entries are those from the second on."""
    made: w.PromptLogprobs = [None]
    for entry in entries:
        found = {str(entry.id): w.PromptToken(entry.logprob, shown(token_bytes(entry.id)))}
        for rank, (token, logprob, _) in enumerate(entry.top, 1):
            found[str(token)] = w.PromptToken(logprob, shown(token_bytes(token)), rank)
        made.append(found)
    return made


class TextScores:
    """The shape of text completions, made piece by piece; offsets count characters of the text."""

    def __init__(self, token_bytes: Bytes) -> None:
        self._bytes = token_bytes
        self._offset = 0

    def first(self, token: int) -> w.TextLogprobs:
        """The prompt's first token, which has no log-probability."""
        text = shown(self._bytes(token))
        made = w.TextLogprobs([text], [None], [None], [self._offset])
        self._offset += len(text)
        return made

    def add(self, entries: Sequence[m.Logprob]) -> w.TextLogprobs:
        """Further tokens."""
        made = w.TextLogprobs([], [], [], [])
        for entry in entries:
            text = shown(self._bytes(entry.id))
            made.tokens.append(text)
            made.token_logprobs.append(entry.logprob)
            top: dict[str, float] = {}
            for token, logprob, _ in entry.top:
                # Two tokens may be written alike; the likelier one comes first.
                top.setdefault(shown(self._bytes(token)), logprob)
            made.top_logprobs.append(top)
            made.text_offset.append(self._offset)
            self._offset += len(text)
        return made


def joined(pieces: Sequence[w.TextLogprobs]) -> w.TextLogprobs:
    """Several pieces as one."""
    made = w.TextLogprobs([], [], [], [])
    for piece in pieces:
        made.tokens += piece.tokens
        made.token_logprobs += piece.token_logprobs
        made.top_logprobs += piece.top_logprobs
        made.text_offset += piece.text_offset
    return made
