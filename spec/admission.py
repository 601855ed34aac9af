"""What the engine accepts: every field of a request checked against the model and the limits.

Refusals name the field and happen before anything is queued. Knows no cache and no device, and
imports no torch: a server whose engine is another process checks requests with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from spec_serve.spec.request import Request, RequestError


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves. vocab_size: ids a caller may name; sources: names of its drafters;
    draft_told: what a trial of its neural drafter found."""

    model: str
    draft: str
    vocab_size: int
    max_context: int
    kv_tokens: int
    max_rows: int
    dtype: str
    device: str
    max_nodes: int
    sources: tuple[str, ...]
    draft_told: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request (ids and counts) and on the queue (choices)."""

    max_waiting: int = 1024
    max_choices: int = 8
    max_top_logprobs: int = 20
    max_bias: int = 1024
    max_stop_ids: int = 1024
    max_bad_words: int = 1024
    max_continued: int = 1024
    max_segments: int = 64


def _number(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    bad = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
    if bad or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(name, f"must be a number in {bracket}{low:g}, {high:g}], got {value!r}")


def _whole(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, f"must be a whole number from {low} to {high}, got {value!r}")


def _ids(name: str, ids: Iterable[int], vocab: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise RequestError(
                name, f"token id {token!r} is not in the vocabulary (0 to {vocab - 1})"
            )


def capacity(info: EngineInfo) -> int:
    """Tokens one choice may have, prompt and completion: context or cache, what is smaller."""
    return min(info.max_context, info.kv_tokens - 1)


def _continuations(request: Request, info: EngineInfo, limits: Limits) -> None:
    name, wanted = "continuations", request.continuations
    if not wanted:
        return
    if not all(wanted):
        raise RequestError(name, "one of them is empty")
    if (count := sum(map(len, wanted))) > limits.max_continued:
        told = f"have {count} tokens together, at most {limits.max_continued} are scored"
        raise RequestError(name, told)
    for tokens in wanted:
        _ids(name, tokens, info.vocab_size)
    if request.prompt_logprobs is not None or request.n > 1:
        raise RequestError(name, "can't be scored together with prompt_logprobs or several choices")
    if request.stopping.max_tokens != 1:
        raise RequestError(name, "are scored with max_tokens 1 only")
    if request.constraint is not None:
        raise RequestError(name, "are scored as they are, which a constraint contradicts")
    if len(request.prompt) + max(map(len, wanted)) >= capacity(info):
        told = f"prompt and continuation have more tokens than the {capacity(info)} that are held"
        raise RequestError(name, told, "context_length_exceeded")


def _segments(request: Request, info: EngineInfo, limits: Limits) -> None:
    segments = request.segments
    if not segments:
        return
    if len(segments) > limits.max_segments:
        raise RequestError("segments", f"are more than {limits.max_segments}")
    for one in (request, *segments):
        if one.n > 1 or one.prompt_logprobs is not None or one.continuations:
            told = "don't go with several choices, prompt_logprobs or continuations"
            raise RequestError("segments", told)
    if (given := request.given) >= capacity(info):
        told = f"and the prompt have {given} tokens, more than the {capacity(info)} that are held"
        raise RequestError("segments", told, "context_length_exceeded")
    for number, one in enumerate(segments):
        try:
            check_request(one, info, limits)
        except RequestError as error:
            said = str(error).removeprefix(f"{error.field}: ")
            raise RequestError(f"segments[{number}].{error.field}", said, error.code) from None


def check_request(request: Request, info: EngineInfo, limits: Limits) -> None:
    """Raise RequestError naming the first field that is wrong."""
    _segments(request, info, limits)
    vocab = info.vocab_size
    prompt, sampling, stopping = request.prompt, request.sampling, request.stopping
    if not prompt:
        raise RequestError("prompt", "must hold at least one token")
    _ids("prompt", prompt, vocab)
    room = capacity(info)
    if len(prompt) >= room:
        what = "context" if room == info.max_context else "KV store"
        raise RequestError(
            "prompt",
            f"has {len(prompt)} tokens, but the {what} holds {room} including at least one new one",
            "context_length_exceeded",
        )
    _whole("n", request.n, 1, limits.max_choices)
    _whole("logprobs", request.logprobs, 0, limits.max_top_logprobs)
    _whole("prompt_logprobs", request.prompt_logprobs, 0, limits.max_top_logprobs)
    _continuations(request, info, limits)
    _number("temperature", sampling.temperature, 0.0, 100.0)
    _whole("top_k", sampling.top_k, 0, 2**31 - 1)
    _number("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    _number("min_p", sampling.min_p, 0.0, 1.0)
    _whole("seed", sampling.seed, -(2**63), 2**64 - 1)
    _number("repetition_penalty", sampling.repetition_penalty, 0.0, 100.0, open_low=True)
    _number("frequency_penalty", sampling.frequency_penalty, -100.0, 100.0)
    _number("presence_penalty", sampling.presence_penalty, -100.0, 100.0)
    if len(sampling.logit_bias) > limits.max_bias:
        raise RequestError("logit_bias", f"has more than {limits.max_bias} entries")
    _ids("logit_bias", sampling.logit_bias, vocab)
    for token, bias in sampling.logit_bias.items():
        _number(f"logit_bias[{token}]", bias, -1000.0, 1000.0)
    if len(sampling.bad_words) > limits.max_bad_words:
        raise RequestError("bad_words", f"has more than {limits.max_bad_words} entries")
    for words in sampling.bad_words:
        if not words:
            raise RequestError("bad_words", "an entry is empty")
        _ids("bad_words", words, vocab)
    _whole("max_tokens", stopping.max_tokens, 1, 2**63 - 1)
    _whole("min_tokens", stopping.min_tokens, 0, 2**63 - 1)
    most = room - len(prompt)
    if stopping.max_tokens is not None:
        most = min(most, stopping.max_tokens)
        if stopping.min_tokens > stopping.max_tokens:
            raise RequestError(
                "min_tokens", f"{stopping.min_tokens} exceeds max_tokens {stopping.max_tokens}"
            )
    if stopping.min_tokens > most:
        raise RequestError(
            "min_tokens", f"{stopping.min_tokens} exceeds the {most} tokens the context leaves"
        )
    if len(stopping.token_ids) > limits.max_stop_ids:
        raise RequestError("stop_token_ids", f"has more than {limits.max_stop_ids} entries")
    _ids("stop_token_ids", stopping.token_ids, vocab)
    if request.constraint is not None and stopping.ignore_eos:
        raise RequestError("ignore_eos", "contradicts a constraint, which ends the text")
    speculation = request.speculation
    if speculation.mode not in ("auto", "off", "max"):
        raise RequestError(
            "speculation.mode", f"must be auto, off or max, not {speculation.mode!r}"
        )
    _whole("speculation.max_nodes", speculation.max_nodes, 0, 2**31 - 1)
    for name in speculation.sources or ():
        if name not in info.sources:
            known = ", ".join(info.sources) or "none"
            raise RequestError("speculation.sources", f"{name[:64]!r} is not one of: {known}")
    _ids("speculation.prediction", speculation.prediction, vocab)
    _whole("priority", request.priority, -(2**31), 2**31 - 1)
