"""An engine for a command: options from the settings, progress for people, quiet for scripts.

Progress goes to standard error: a bar on a terminal, plain lines elsewhere. Knows how errors of
loading are told; how loading works is known in spec/load.py, imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from spec_serve.api.cli_flags import say
from spec_serve.api.settings import Settings

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from spec_serve.api.process_child import EngineProcess
    from spec_serve.spec.engine import Engine
    from spec_serve.target.tokenizer import Tokenizer

NAMES = {
    "tokenizer": "reading the tokenizer",
    "target": "loading the target",
    "draft": "loading the draft model",
    "measuring": "measuring step times",
}


class Told(Protocol):
    """What loading reports to: (what is going on, share done from 0 to 1)."""

    def __call__(self, what: str, share: float, /) -> None: ...


class Plain:
    """One line when something begins, one with the seconds when all is ready."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._what = ""

    def __call__(self, what: str, share: float, /) -> None:
        if what == self._what:
            return
        self._what = what
        if what == "ready":
            say(f"loaded in {time.monotonic() - self._begun:.1f} s")
        else:
            say(NAMES.get(what, what))


class Drawn:
    """A bar per thing going on, drawn with rich on a terminal; gone once all is ready."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Drawn:
        return self

    def __call__(self, what: str, share: float, /) -> None:
        if what == "ready":
            self._stop()
            say(f"loaded in {time.monotonic() - self._begun:.1f} s")
            return
        if self._bars is None:  # not before: fetching a model draws bars of its own
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        if what not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, completed=1.0)
            self._tasks[what] = self._bars.add_task(NAMES.get(what, what), total=1.0)
        self._bars.update(self._tasks[what], completed=share)

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Told]:
    """What to report loading to; nothing is said with `quiet`."""
    if quiet:
        yield lambda what, share: None
    elif sys.stderr.isatty():
        with Drawn() as drawn:
            yield drawn
    else:
        yield Plain()


def open_engine(settings: Settings) -> tuple[Engine, Tokenizer]:
    """Load what the settings name. Raises ValueError (SettingError, ModelNotFound, ...) or OSError
    for what a user can mend."""
    fields = settings.engine_fields()
    import torch

    from spec_serve.spec.assemble import EngineOptions
    from spec_serve.spec.load import build_engine

    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    with progress(bool(settings["quiet"])) as told:
        return build_engine(EngineOptions(**fields), told)


def open_process(settings: Settings) -> tuple[EngineProcess, Tokenizer]:
    """The same in a process of its own; here only the tokenizer is read.

    Raises ValueError or OSError, with the words `open_engine` has."""
    from spec_serve.api.process_child import launch
    from spec_serve.api.process_messages import Load
    from spec_serve.target.hub import resolve
    from spec_serve.target.tokenizer import load_tokenizer

    quiet = bool(settings["quiet"])
    asked = Load(settings.engine_fields(), settings["threads"], settings["log-format"], quiet)
    with progress(quiet) as told:
        engine = launch(asked, told)
    try:
        return engine, load_tokenizer(resolve(settings["target"], progress=False))
    except BaseException:
        engine.close()
        raise
