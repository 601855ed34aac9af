"""What a request cost and what speculation did for it, in the dialects of three servers.

OpenAI's usage, llama.cpp's timings and vLLM's metrics, all from the `finished` messages of the
choices. Nothing is filled in that was not measured.
"""

from __future__ import annotations

from time import monotonic

from msgspec import UNSET

from spec_serve.api import messages as m
from spec_serve.api import openai_wire as w


class Totals:
    """Sums over the choices of a request. count: tokens were asked for at all."""

    def __init__(self, count: bool = True) -> None:
        self._count = count
        self._prompts: dict[str, m.Usage] = {}  # gen -> of its first choice
        self._usages: list[m.Usage] = []
        self._timings: list[m.Timings] = []
        self._steps = self._drafted = self._accepted = 0
        self._histogram: list[int] = []

    def add(self, finished: m.Finished) -> None:
        """One choice is over."""
        usage = finished.usage
        held = self._prompts.get(finished.gen)
        # Later choices find what the first one computed: what was cached before, that one knows.
        if held is None or finished.index == 0:
            self._prompts[finished.gen] = usage
        self._usages.append(usage)
        self._timings.append(finished.timings)
        summary = finished.speculation
        if summary is not None:
            self._steps += summary.steps
            self._drafted += summary.drafted
            self._accepted += summary.accepted
            for accepted, steps in enumerate(summary.histogram):
                if accepted == len(self._histogram):
                    self._histogram.append(0)
                self._histogram[accepted] += steps

    def usage(self) -> w.Usage:
        """OpenAI's: prompts once each, tokens delivered over all choices."""
        prompt = sum(usage.prompt_tokens for usage in self._prompts.values())
        completion = sum(usage.completion_tokens for usage in self._usages) if self._count else 0
        return w.Usage(
            prompt,
            completion,
            prompt + completion,
            w.TokenDetails(self._cached()),
            w.CompletionDetails(
                sum(usage.accepted_prediction_tokens for usage in self._usages),
                sum(usage.rejected_prediction_tokens for usage in self._usages),
                0,
            ),
        )

    def timings(self) -> w.Timings:
        """llama.cpp's."""
        completion = sum(usage.completion_tokens for usage in self._usages)
        cached = self._cached()
        slowest = max((timings.decode_ms for timings in self._timings), default=0.0)
        return w.Timings(
            cached,
            sum(usage.prompt_tokens for usage in self._prompts.values()) - cached,
            max((timings.prefill_ms for timings in self._timings), default=0.0),
            completion,
            slowest,
            1000.0 * completion / slowest if slowest else None,
            self._drafted,
            self._accepted,
        )

    def metrics(self) -> w.Metrics:
        """vLLM's."""
        steps, drafted, accepted = self._steps, self._drafted, self._accepted
        return w.Metrics(
            w.SpeculativeDecoding(
                1.0 + accepted / steps if steps else 0.0,
                accepted / drafted if drafted else 0.0,
                self._histogram,
                steps,
                accepted,
                drafted,
            )
        )

    def _cached(self) -> int:
        return sum(usage.cached_tokens for usage in self._prompts.values())


class Clock:
    """Timings of a choice that still runs, as they are asked for with every chunk.

    Tokens and guesses so far; times as seen here, from admission and from the first token.
    """

    def __init__(self) -> None:
        self._prompt = self._cached = 0
        self._admitted = self._first = monotonic()
        self._tokens = 0

    def start(self, started: m.Started) -> None:
        """The request was admitted."""
        self._prompt, self._cached = started.prompt_tokens, started.cached_tokens
        self._admitted = monotonic()

    def step(self, tokens: int) -> w.Timings:
        """Tokens came."""
        now = monotonic()
        if not self._tokens:
            self._first = now
        self._tokens += tokens
        decode = 1000.0 * (now - self._first)
        return w.Timings(
            self._cached,
            self._prompt - self._cached,
            1000.0 * (self._first - self._admitted),
            self._tokens,
            decode,
            1000.0 * self._tokens / decode if decode else None,
            UNSET,
            UNSET,
        )
