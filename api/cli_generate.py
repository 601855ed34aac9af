"""`spec-serve generate`: one prompt answered in this process, without a server.

Standard output holds the text as it comes, or with --json exactly one object; everything else goes
to standard error. Drives the engine step by step in this thread; knows no transport.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from spec_serve.api.cli import INTERRUPTED
from spec_serve.api.cli_engine import open_engine
from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings, say
from spec_serve.api.cli_prompt import (
    add_constraint,
    add_sampling,
    completion_json,
    make_wire,
    read_constraint,
    read_prompt,
)
from spec_serve.api.messages import BadMessage
from spec_serve.api.settings import ENGINE_GROUPS, PROCESS, SettingError

if TYPE_CHECKING:
    from spec_serve.api.convert import Prepared
    from spec_serve.spec.completion import Completion
    from spec_serve.spec.engine import Engine

MAX_TOKENS = 256


def parser() -> Parser:
    """The flags of `generate`."""
    made = Parser(
        "spec-serve generate",
        "Answer one prompt without a server. Greedy unless --temperature is given.",
    )
    section = made.add_argument_group("prompt (one of)")
    prompt = section.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="continue the text of a file; - = standard input"
    )
    prompt.add_argument(
        "--chat", metavar="TEXT", help="answer this message, by the model's chat template"
    )
    prompt.add_argument(
        "--messages-file", metavar="FILE", help="answer a chat: a JSON list of {role, content}"
    )
    add_sampling(made, MAX_TOKENS)
    add_constraint(made)
    section = made.add_argument_group("result")
    section.add_argument(
        "--json", action="store_true", help="print one JSON object with ids, text, usage, timings"
    )
    section.add_argument(
        "--logprobs", type=int, metavar="K",
        help="with --json: log-probability of each token and of the K most probable",
    )  # fmt: skip
    add_settings(made, (*ENGINE_GROUPS, PROCESS))
    return made


def main(argv: Sequence[str]) -> int:
    """Generate; returns the exit code."""
    made = parser()
    given = made.parse_args(argv)
    if given.logprobs is not None and not given.json:
        made.error("--logprobs needs --json")
    try:
        settings = read_settings(given)
        settings.engine_fields()
        asked = {**read_prompt(given), "constraint": read_constraint(given)}
        wire = make_wire(asked, given, settings["speculation"])
        engine, tokenizer = open_engine(settings)
        from spec_serve.api.convert import to_request

        prepared = to_request(wire, tokenizer)
        engine.validate(prepared.request)
    except (SettingError, BadMessage) as error:
        return fail(error)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    done, text, interrupted = run(engine, prepared, None if given.json else show)
    if given.json:
        print(json.dumps(completion_json(done, text, tokenizer)), flush=True)
    else:
        print(flush=True)
        if not settings["quiet"]:
            say(summary(done))
    if done.error is not None:
        return fail(done.error, 1)
    return INTERRUPTED if interrupted else 0


def show(text: str) -> None:
    """Write a piece of text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that the first Ctrl-C fills: an exception in the middle of a step would spoil the
    engine. The second one raises KeyboardInterrupt."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # signals reach only the main thread
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def run(
    engine: Engine,
    prepared: Prepared,
    show: Callable[[str], None] | None = None,
) -> tuple[Completion, str, bool]:
    """Run one request of one choice to its end in this thread.

    show: gets each piece of text as soon as it is safe. An interrupt (Ctrl-C) cancels the request.
    Returns the completion, its whole text, and whether it was interrupted.
    """
    from spec_serve.spec.completion import collect
    from spec_serve.spec.request import Delta, Event

    request, stream = prepared.request, prepared.text_stream()
    events: list[Event] = []
    parts: list[str] = []
    interrupted = False

    def add(text: str) -> None:
        if text:
            parts.append(text)
            if show is not None:
                show(text)

    with _interrupts() as seen:
        engine.submit(request)
        while not engine.idle():
            if seen and not interrupted:
                interrupted = True
                engine.cancel(request.id)
            made = engine.step()
            events += made
            for event in made:
                if isinstance(event, Delta):
                    add(stream.push(event.tokens))
    add(stream.finish())
    (done,) = collect([request], events)
    return done, "".join(parts), interrupted


def summary(done: Completion) -> str:
    """One line about a completion: tokens, speed, tokens per step."""
    tokens, steps = len(done.tokens), len(done.steps)
    parts = [f"{tokens} tokens", f"{done.reason}"]
    if steps:
        parts.append(f"{tokens / steps:.2f} tokens per step")
    if tokens > 1 and done.timings.decode_ms > 0:
        parts.append(f"{(tokens - 1) / done.timings.decode_ms * 1e3:.1f} tokens/s")
    parts.append(f"first after {done.timings.ttft_ms:.0f} ms")
    drafted = sum(step.drafted for step in done.steps)
    if drafted:
        accepted = sum(step.accepted for step in done.steps)
        parts.append(f"{accepted} of {drafted} guesses accepted")
    if done.constraint is not None and not done.constraint.complete:
        parts.append("cut short of what the text has to look like")
    if done.constraint is not None and done.constraint.ignored:
        parts.append(f"not enforced: {', '.join(done.constraint.ignored)}")
    return ", ".join(parts)
