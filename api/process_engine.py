"""The engine's side of `--engine-process`: load, say so, step, tell every step's events.

Run as `python -m spec_serve.api.process_engine FD` with one end of a socketpair. The main thread
loads and steps; a second one reads what the server sends. Ends when the server is gone. Signals
are the server's to handle. Knows no text beyond the stop strings of requests.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic

from spec_serve.api import logs
from spec_serve.api import process_messages as p
from spec_serve.api.link import AT_ONCE, NOTHING, SWITCH_INTERVAL, Runs
from spec_serve.api.process_channel import Channel
from spec_serve.api.text import TokenTable
from spec_serve.spec.request import (
    Event,
    Finished,
    Request,
    RequestError,
)

log = logging.getLogger("spec_serve.engine_process")

STATS_S = 0.02  # how old the counters of a busy engine may be, seconds
TICK_S = 0.2  # the same while a step goes on without events, as in a long prefill
BEAT_S = 0.5  # between signs of life of an engine with nothing to do

Tell = Callable[[str, float], None]
Opened = tuple[Runs, TokenTable]
Open = Callable[[p.Load, Tell], Opened]


class Worker:
    """One engine behind a channel. orphaned: called in a thread of its own if the server goes."""

    def __init__(self, channel: Channel, orphaned: Callable[[], None]) -> None:
        self._channel, self._orphaned = channel, orphaned
        self.engine: Runs | None = None
        self._tokenizer: TokenTable | None = None
        self._open: dict[str, tuple[int, set[int]]] = {}  # id -> number, choices not over
        self._ids: dict[int, str] = {}
        self._lock = threading.Lock()  # around both
        self._ready = False  # and told so
        self._seen = 0
        self._told = 0.0

    def run(self, load: Open) -> int:
        """Until told to stop: the exit code."""
        first = self._channel.receive()
        if first is None:
            return 1
        asked = p.for_engine(first)
        assert isinstance(asked, p.Load), "the first message says what to load"
        threading.Thread(target=self._read, name="from the server", daemon=True).start()
        try:
            engine, self._tokenizer = load(asked, self._loading)
        except (ValueError, OSError) as error:
            self._send(p.Failed(str(error)))
            return 1
        self.engine = engine
        # What is loaded stays: never walk it again.
        gc.collect()
        gc.freeze()
        self._send(p.Ready(engine.info, engine.limits))
        self._ready = True
        try:
            engine.run(self._publish)
        except Exception:
            log.exception("the engine stopped")
            return 1
        return 0

    def _loading(self, what: str, share: float) -> None:
        self._send(p.Loading(what, share))

    def _send(self, message: p.FromEngine) -> None:
        try:
            self._channel.send(p.encode(message))
        except OSError:
            log.debug("the server is gone")  # the reading thread sees to it

    # ---- the reading thread

    def _read(self) -> None:
        while True:
            try:
                payload = self._channel.receive(TICK_S if self._ids else BEAT_S)
            except TimeoutError:
                if self._ready and monotonic() - self._told >= TICK_S:
                    self._tell([], True)
                continue
            if payload is None:
                self._orphaned()
                return
            try:
                self._do(p.for_engine(payload))
            except Exception:
                log.exception("a message of the server was not understood")

    def _do(self, message: p.ToEngine) -> None:
        engine = self.engine
        if engine is None:  # nothing but the end is sent before all is loaded
            self._orphaned()
            return
        match message:
            case p.Submit():
                self._submit(engine, message)
            case p.Cancel():
                with self._lock:
                    request_id = self._ids.get(message.number)
                if request_id is not None:
                    engine.cancel(request_id)
            case p.Flush():
                asked = engine.flush()
                asked.add_done_callback(lambda done: self._flushed(message.number, done))
            case p.Drain():
                engine.drain()
            case p.Stop():
                engine.stop()

    def _submit(self, engine: Runs, message: p.Submit) -> None:
        assert self._tokenizer is not None
        request = p.from_submit(message, self._tokenizer)
        with self._lock:
            self._open[request.id] = message.number, set(range(request.n))
            self._ids[message.number] = request.id
        try:
            engine.submit(request)
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("request %r could not begin", request.id)
                error = RequestError("", "the engine failed to begin this request", "engine_error")
            self._tell([_end(request, index, error) for index in range(request.n)], False)
        self._seen = message.number

    def _flushed(self, number: int, done: Future[int]) -> None:
        self._tell([], True)
        self._send(p.Flushed(number, done.result()))

    # ---- the engine's thread

    def _publish(self, events: list[Event]) -> None:
        assert self.engine is not None
        self._tell(events, monotonic() - self._told >= STATS_S or self.engine.idle())

    def _tell(self, events: list[Event], stats: bool) -> None:
        engine = self.engine
        assert engine is not None
        told: list[p.Told] = []
        with self._lock:  # sending, too: older counters must not overtake newer ones
            for event in events:
                held = self._open.get(event.request.id)
                if held is None:
                    continue
                number, left = held
                told.append(p.to_told(number, event))
                if type(event) is Finished:
                    left.discard(event.index)
                    if not left:
                        del self._open[event.request.id], self._ids[number]
            step = p.Step(told, self._seen, None)
            if stats:
                step.stats = engine.stats()
                self._told = monotonic()
            try:
                payload = p.encode(step)
            except Exception:
                log.exception("an event can't be told")
                step.events = [self._sound(event) for event in told]
                payload = p.encode(step)
            try:
                self._channel.send(payload)
                if engine.blocks is not None and (changes := engine.blocks.take()):
                    self._channel.send(p.encode(p.CacheChanged(p.to_blocks(changes))))
            except OSError:
                log.debug("the server is gone")

    def _sound(self, told: p.Told) -> p.Told:
        """What was to be told, or the end of its choice where that can't be encoded."""
        try:
            p.encode(p.Step([told], 0, None))
        except Exception:
            if (request_id := self._ids.get(told.number)) is not None and self.engine is not None:
                self.engine.cancel(request_id)
            error = RequestError("", "the engine failed while serving this request", "engine_error")
            return p.Finished(
                told.number, told.index, "error", None, NOTHING, AT_ONCE, p.to_failure(error)
            )
        return told


def _end(request: Request, index: int, error: RequestError) -> Event:
    return Finished(request, index, "error", None, NOTHING, AT_ONCE, error)


def open_model(asked: p.Load, tell: Tell) -> Opened:
    """Load what was asked for. Raises ValueError or OSError for what a user can mend."""
    logs.set_up(asked.log_format, asked.quiet)
    import torch

    from spec_serve.spec.assemble import EngineOptions
    from spec_serve.spec.load import build_engine

    if asked.threads:
        torch.set_num_threads(asked.threads)
    options = EngineOptions(**asked.options)
    # Without someone to tell, fetching a model draws no bars either.
    return build_engine(options) if asked.quiet else build_engine(options, tell)


def main(argv: Sequence[str], load: Open = open_model) -> int:
    """Work behind the descriptor named; the exit code."""
    # A terminal and a service manager tell every process of a group; the server drains us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL)
    # There is nothing left to tell and nothing to save, whatever the engine is at.
    worker = Worker(Channel(socket.socket(fileno=int(argv[0]))), lambda: os._exit(1))
    return worker.run(load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
