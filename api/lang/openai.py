"""A backend for servers that only speak OpenAI's HTTP: does what these can, warns of the rest.

Such a server gives no token ids: here an "id" is a character, or a mark of a turn's begin or end,
so that states work as ever, and the server's template makes the tokens. Knows no states.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
import warnings
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from spec_serve.api import messages as m
from spec_serve.client.answers import GenerationEvent, ServerError
from spec_serve.lang.conversation import Parts, Question
from spec_serve.lang.parts import ProgramError

_TURN, _END = 0x110000, 0x11000F  # beyond all characters; the roles' marks follow _TURN
_ROLES = ("system", "user", "assistant", "developer", "tool")
_PASSED = ("max_tokens", "stop")
_SAMPLED = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n", "logit_bias",
)  # fmt: skip
_BOUNDS = ("max_chars", "min_chars", "max_words", "max_sentences", "banned")
_REASONS: dict[str, m.Reason] = {"stop": "stop", "length": "length"}
_CODES: dict[int, m.Code] = {
    401: "unauthorized", 403: "forbidden", 404: "model_not_found", 429: "rate_limited",
    503: "overloaded",
}  # fmt: skip


class OpenAIWarning(RuntimeWarning):
    """Something is done less well than a server of ours would."""


class OpenAIBackend:
    """url: up to and with "/v1". timeout_s: of silence. parallel: requests at once.

    What is less than on a server of ours, each with a warning the first time: text that an answer
    begins with is sent as a turn of its own; `select` asks for one of the choices instead of
    scoring them; regex and choices are checked on the finished text; further options are left out.
    """

    prepares = False  # nothing is gained by asking ahead

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        parallel: int = 16,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} isn't an address such as https://host/v1")
        self._url, self._model, self._key = url.rstrip("/"), model, api_key
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(parallel, "openai")
        self._told: set[str] = set()

    async def pieces(self, question: Question) -> list[list[int]]:
        """Characters and marks around the places of generated text; nothing is asked."""
        made: list[list[int]] = [[]]
        if question.text is not None:
            _spell(question.text, made)
        for turn in question.turns or ():
            made[-1].append(_TURN + _ROLES.index(turn.role))
            _spell(turn.parts, made)
            made[-1].append(_END)
        if question.begun is not None:
            made[-1].append(_TURN + _ROLES.index("assistant"))
            _spell(question.begun, made)
        return made

    async def generate(
        self, token_ids: list[int], options: dict[str, Any]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of a completion. Raises ServerError, OSError, ProgramError."""
        body = self._body(options)
        if token_ids and token_ids[0] >= _TURN:
            path, body["messages"] = "/chat/completions", self._messages(token_ids)
        else:
            path, body["prompt"] = "/completions", _text(token_ids)
        texts: dict[int, str] = {}
        reasons: dict[int, m.Reason] = {}
        usage = m.Usage(0, 0)
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                if (told := event.get("usage")) is not None:
                    usage = m.Usage(told["prompt_tokens"], told["completion_tokens"])
                for choice in event.get("choices", ()):
                    index = choice.get("index", 0)
                    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    texts[index] = texts.get(index, "") + text
                    if (reason := choice.get("finish_reason")) is not None:
                        reasons[index] = _REASONS.get(reason, "stop")
                    if text:
                        yield m.Delta("", 0, index, text, list(map(ord, text)))
        for index in range(max(texts, default=0) + 1):
            self._check(options.get("constraint"), texts.get(index, ""))
            yield m.Finished(
                gen="", seq=0, index=index, reason=reasons.get(index, "stop"), usage=usage,
                timings=m.Timings(0, 0, 0, 0), last=index >= max(texts, default=0),
            )  # fmt: skip

    async def score(
        self, token_ids: list[int], continuations: list[list[int]]
    ) -> list[list[float]]:
        """0 for the continuation that the model names when it is asked for one; -1 for others."""
        self._warn("select asks the model for one of the choices; it scores nothing")
        choices = [_text(one) for one in continuations]
        told = ", ".join(json.dumps(choice.strip(), ensure_ascii=False) for choice in choices)
        asked = f"Which one goes on here? Say one of these and nothing else: {told}"
        body: dict[str, Any] = {"model": self._model, "temperature": 0, "max_tokens": 64}
        if token_ids[0] >= _TURN:
            turns = self._messages(token_ids)
        else:
            turns = [{"role": "user", "content": _text(token_ids)}]
        body["messages"] = [*turns, {"role": "user", "content": asked}]
        said = ""
        async with aclosing(self._events("/chat/completions", body)) as events:
            async for event in events:
                for choice in event.get("choices", ()):
                    said += (choice.get("delta") or {}).get("content") or ""
        named = max(choices, key=lambda choice: _alike(choice, said))
        return [[0.0 if choice == named else -1.0] * len(choice) for choice in choices]

    # -- what is asked

    def _body(self, options: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model}
        sampling = options.get("sampling", {})
        body |= {name: options[name] for name in _PASSED if name in options}
        body |= {name: sampling[name] for name in _SAMPLED if name in sampling}
        left = set(options) - {*_PASSED, "sampling", "constraint", "logprobs", "ids"}
        left |= set(sampling) - {*_SAMPLED}
        if left:
            self._warn(f"left out: {', '.join(sorted(left))}")
        wanted = options.get("constraint")
        if wanted is not None:
            self._warn_of(wanted)
        if wanted is not None and wanted["kind"] == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif wanted is not None and wanted["kind"] == "json_schema":
            schema = json.loads(wanted["source"])
            told = {"name": "value", "schema": schema, "strict": wanted.get("strict", True)}
            body["response_format"] = {"type": "json_schema", "json_schema": told}
        elif wanted is not None and wanted["kind"] in ("regex", "choices"):
            self._warn("regex and choices are checked when the text is finished, not enforced")
        elif wanted is not None and wanted["kind"] != "text":
            raise ProgramError(f"constraint: this server has no grammars ({wanted['kind']})")
        return body

    def _warn_of(self, wanted: dict[str, Any]) -> None:
        """What of a constraint such a server can't be told."""
        if wanted.get("after"):
            raise ProgramError("constraint: this server can't be told to wait for a marker (after)")
        if left := [name for name in _BOUNDS if wanted.get(name)]:
            self._warn(f"left out: {', '.join(left)}")

    def _messages(self, token_ids: list[int]) -> list[dict[str, str]]:
        made: list[dict[str, str]] = []
        for one in token_ids:
            if one == _END:
                continue
            if one >= _TURN:
                made.append({"role": _ROLES[one - _TURN], "content": ""})
            else:
                made[-1]["content"] += chr(one)
        if token_ids[-1] == _END:
            return made
        if made[-1]["content"]:
            self._warn("text that an answer begins with is a turn; the answer may begin anew")
            return made
        return made[:-1]

    def _check(self, wanted: dict[str, Any] | None, text: str) -> None:
        if wanted is None:
            return
        kind, source = wanted["kind"], wanted.get("source", "")
        if kind == "regex" and re.fullmatch(source, text) is None:
            raise ProgramError(f"the server's text does not match the regex: {text[:80]!r}")
        if kind == "choices" and text not in json.loads(source):
            raise ProgramError(f"the server's text is none of the choices: {text[:80]!r}")

    def _warn(self, told: str) -> None:
        if told not in self._told:
            self._told.add(told)
            warnings.warn(f"{self._url}: {told}", OpenAIWarning, stacklevel=4)

    # -- how

    async def _events(
        self, path: str, body: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes | Exception | None]()
        told = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            self._url + path, json.dumps(told).encode(), headers, method="POST"
        )
        left = False

        def read() -> None:
            last: Exception | None = None
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    for line in answer:
                        if left:
                            return
                        loop.call_soon_threadsafe(queue.put_nowait, line)
            except Exception as error:
                last = error
            loop.call_soon_threadsafe(queue.put_nowait, last)

        reading = loop.run_in_executor(self._pool, read)
        try:
            while (line := await queue.get()) is not None:
                if isinstance(line, Exception):
                    raise _failure(line)
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise ServerError(m.Error("engine_error", str(event["error"])[:500]))
                    yield event
            await reading
        finally:
            left = True


def _spell(parts: Parts, made: list[list[int]]) -> None:
    for part in parts:
        if part is None:
            made.append([])
        else:
            made[-1] += map(ord, part)


def _text(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def _alike(choice: str, said: str) -> int:
    """How well an answer names a choice: that it holds it, then how it begins."""
    wanted, given = choice.strip().lower(), said.strip().strip("\"'.").lower()
    begun = next((i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), 0)
    return (given == wanted) * 10_000 + (wanted in given) * 1_000 + begun


def _failure(error: Exception) -> Exception:
    if not isinstance(error, urllib.error.HTTPError):
        return error
    told = error.read(2000).decode(errors="replace")
    code = _CODES.get(error.code, "invalid_request" if error.code < 500 else "engine_error")
    retry = error.code in (429, 503)
    return ServerError(m.Error(code, f"{error.code}: {told}", retryable=retry))
