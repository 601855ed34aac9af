"""`spec-serve chat --connect URL`: the same conversation with a server instead of an engine.

Speaks to it through `spec_serve.client`, over a WebSocket or a gRPC session, and comes back after a
drop. Loads no model and no torch.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_serve.api.messages import Delta, Generate
from spec_serve.api.settings import SettingError
from spec_serve.client import Answer, ServerError, SyncClient, Tls

API_KEY = "SPEC_SERVE_API_KEY"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Flags for reaching a server."""
    section = parser.add_argument_group("a running server instead of a model")
    section.add_argument(
        "--connect", metavar="URL", help="ws://HOST:8000 or grpc://HOST:50051; wss, grpcs with TLS"
    )
    section.add_argument(
        "--key-file", metavar="FILE",
        help=f"holds the API key in its first line; otherwise the variable {API_KEY} does",
    )  # fmt: skip
    section.add_argument("--ca", metavar="FILE", help="authorities to trust (PEM)")


def open_client(given: argparse.Namespace) -> SyncClient:
    """The client for these flags, not connected yet. SettingError for a bad address or file."""
    try:
        key = os.environ.get(API_KEY) or None
        if given.key_file:
            key = Path(given.key_file).read_text(encoding="utf-8").split("\n", 1)[0].strip()
        tls = Tls(given.ca) if given.ca else None
        return SyncClient(given.connect, api_key=key, tls=tls, resume=True)
    except (OSError, ValueError) as error:
        raise SettingError(f"connect: {error}") from error


def ask(client: SyncClient, wire: Generate, show: Callable[[str], None]) -> Answer:
    """One turn. show: gets each piece of text. Ctrl-C stops it, and what came is the answer.

    Raises ServerError, OSError, TimeoutError, BadMessage.
    """
    sampling = {name: getattr(wire.sampling, name) for name in wire.sampling.__struct_fields__}
    options: dict[str, Any] = {
        "sampling": sampling,
        "max_tokens": wire.max_tokens,
        "stop": wire.stop,
        "ignore_eos": wire.ignore_eos,
        "speculation": {"mode": wire.speculation.mode},
    }
    turns = [{"role": turn.role, "content": turn.content} for turn in wire.messages or ()]
    answer = Answer()
    try:
        for event in client.generate(messages=turns, **options):
            answer.add(event)
            if isinstance(event, Delta):
                show(event.text)
    except KeyboardInterrupt:
        pass
    return answer


def told(answer: Answer) -> list[str]:
    """What is said below an answer; nothing if it was cut short."""
    usage, times, spec = answer.usage, answer.timings, answer.speculation
    if usage is None or times is None:
        return []
    tokens = usage.completion_tokens
    parts = [f"{tokens} tokens", answer.reason]
    if spec is not None and spec.steps:
        parts.append(f"{tokens / spec.steps:.2f} tokens per step")
    if tokens > 1 and times.decode_ms > 0:
        parts.append(f"{(tokens - 1) / times.decode_ms * 1e3:.1f} tokens/s")
    parts.append(f"first after {times.ttft_ms:.0f} ms")
    if spec is not None and spec.drafted:
        parts.append(f"{spec.accepted} of {spec.drafted} guesses accepted")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} tokens from the cache")
    lines = [", ".join(parts)]
    if steps := answer.choices[0].steps:
        lines.append(f"tokens per step: {counted(step.accepted + 1 for step in steps)}")
    return lines


def counted(values: Any) -> str:
    """How often each value comes: "1 x12, 3 x4"."""
    return ", ".join(f"{value} x{times}" for value, times in sorted(Counter(values).items()))


def failed(error: Exception) -> str:
    """An error for people."""
    if isinstance(error, ServerError):
        return f"{error.code}: {error}"
    return str(error) or type(error).__name__
