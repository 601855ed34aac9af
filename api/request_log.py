"""One log line per request that ended: its id, sizes and times; never a word of it.

An observer of the link. Text logs show the line, JSON logs its parts as fields beside the message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spec_serve.spec.request import Event, Finished

log = logging.getLogger("spec_serve.requests")


class RequestLog:
    """Sums the choices of each request up and says so when the last one ends."""

    def __init__(self) -> None:
        self._live: dict[str, list[int]] = {}  # request -> choices left, completion tokens

    def observe(self, events: Sequence[Event]) -> None:
        """One step's events."""
        for event in events:
            if type(event) is Finished and log.isEnabledFor(logging.INFO):
                request = event.request
                held = self._live.setdefault(request.id, [request.n, 0])
                held[0] -= 1
                held[1] += event.usage.completion_tokens
                if not held[0]:
                    del self._live[request.id]
                    self._say(event, held[1])

    def _say(self, event: Finished, tokens: int) -> None:
        usage, timings = event.usage, event.timings
        code = event.error.code if event.error is not None else ""
        log.info(
            "%s: %s, %d tokens after %d (%d cached) in %.0f ms, first after %.0f",
            event.request.id,
            code or event.reason,
            tokens,
            usage.prompt_tokens,
            usage.cached_tokens,
            timings.ttft_ms + timings.decode_ms,
            timings.ttft_ms,
            extra={
                "request_id": event.request.id,
                "reason": event.reason,
                "code": code,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": tokens,
                "choices": event.request.n,
                "queue_ms": round(timings.queue_ms, 3),
                "ttft_ms": round(timings.ttft_ms, 3),
                "decode_ms": round(timings.decode_ms, 3),
            },
        )
