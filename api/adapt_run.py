"""`spec-serve train --adapt HEAD --from FOLDER`: a served head made better by a server's traffic.

The traffic is parted by age. A candidate is trained on the oldest part from the head that is
served now, its best checkpoint chosen on the next, and both heads draft through the newest, which
neither has seen: only if the candidate needs fewer steps there, by more than chance, does the link
`current` come to point to it. What is broken off goes on. The stages are cli_train's.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from spec_serve.api import cli_train
from spec_serve.api.cli_flags import say
from spec_serve.api.settings import Settings
from spec_serve.spec.adapt_link import CURRENT, current

if TYPE_CHECKING:
    from spec_serve.draft.train.judge import Verdict
    from spec_serve.draft.train.session import Folder

EPOCHS = 3
Bar = Callable[[str, bool], AbstractContextManager[cli_train.Update]]


def adapt(given: argparse.Namespace, settings: Settings, bar: Bar) -> None:
    """One candidate from the traffic there is. ValueError for what a user can mend."""
    root = Path(given.source)
    if not root.is_dir():
        raise ValueError(f"from: {root} is no folder")
    with _alone(root):
        _adapt(root, given, settings, bar)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the folder against other runs; the system lets go of it however a run ends."""
    with (root / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"from: another run is at work in {root}") from error
        yield


def _adapt(root: Path, given: argparse.Namespace, settings: Settings, bar: Bar) -> None:
    from spec_serve.draft.heads import find_head
    from spec_serve.draft.train.session import Folder

    run = Folder(root / "candidate")
    judged = Folder(run.root / "judged")
    served = current(root) or find_head(given.adapt) or Path(given.adapt)
    given.adapt = str(served)
    tokens = _part(root, run, judged, given)
    if not given.pairs:
        given.pairs = max(EPOCHS * tokens, 1)
    quiet = bool(settings["quiet"])
    for folder in (run, judged):
        with bar("capturing", quiet) as update:
            cli_train.capture(folder, given, settings, update)
    with bar("training", quiet) as update:
        cli_train.train(run, given, settings, update)
    if not run.best.exists():
        say("no checkpoint was better than the head that is served; it stays")
    else:
        given.out = str(run.root / "head")
        cli_train.export(run, given, settings)
        verdict = _judge(served, Path(given.out), judged, given, settings)
        say(verdict.told())
        if verdict.better:
            say(f"served from now on: {_swap(root, Path(given.out), verdict)}")
    shutil.rmtree(run.root)


KEPT = 3
"""Heads that stay in the folder: the one that is served, and two to go back to."""


def _part(root: Path, run: Folder, judged: Folder, given: argparse.Namespace) -> int:
    """Copy the traffic to where a run keeps answers, once; returns the tokens trained on."""
    from dataclasses import replace

    from spec_serve.draft.train.answers import add_answers, read_answers
    from spec_serve.draft.train.traffic import parted, read

    context = given.max_prompt + given.max_tokens
    if not judged.answers.exists():
        fits = [
            replace(one, answer=one.answer[: context - len(one.prompt)])
            for one in read(root)
            if len(one.prompt) <= given.max_prompt
        ]
        trained, chosen, newest = parted(fits)
        run.answers.unlink(missing_ok=True)
        add_answers(run.answers, [*trained, *(replace(one, held=True) for one in chosen)])
        # Last, as the sign that all is there.
        add_answers(judged.answers, (replace(one, held=True) for one in newest))
    return sum(len(one.answer) for one in read_answers(run.answers) if not one.held)


def _judge(
    served: Path, candidate: Path, judged: Folder, given: argparse.Namespace, settings: Settings
) -> Verdict:
    """Both heads as their files hold them, drafting through traffic neither was trained on."""
    from spec_serve.draft.train.judge import judge
    from spec_serve.draft.train.start import read_start
    from spec_serve.target.config import ModelConfig
    from spec_serve.target.weights import open_checkpoint

    target = cli_train.checkpoint(settings)
    config = ModelConfig.from_checkpoint_config(target.config)
    starts = [read_start(open_checkpoint(path), config) for path in (served, candidate)]
    return judge(judged.captured(True), starts[0], starts[1], target)


def _swap(root: Path, head: Path, verdict: Verdict) -> Path:
    """Put a head among `heads` and let `current` point to it; what is served is always whole."""
    heads = root / "heads"
    heads.mkdir(exist_ok=True)
    number = max((int(path.name) for path in heads.iterdir() if path.name.isdigit()), default=0) + 1
    kept = heads / f"{number:05}"
    (head / "judged.json").write_text(json.dumps(asdict(verdict)) + "\n", encoding="utf-8")
    os.replace(head, kept)
    link = root / f"{CURRENT}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("heads") / kept.name)
    os.replace(link, root / CURRENT)
    for old in sorted(path for path in heads.iterdir() if path.name.isdigit())[:-KEPT]:
        shutil.rmtree(old)
    return kept
