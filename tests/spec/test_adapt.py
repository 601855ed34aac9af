"""A head that makes way for another: when it is looked for, which are taken, what follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Drafter, Noise, Plan, Seen
from spec_serve.spec.adapt import LOOK_S, ExchangeableHead

PLAN = Plan(1, 1, 1)


class Fake:
    """A drafter that says its name."""

    def __init__(self, name: str, taps: tuple[int, ...] = (1, 2)) -> None:
        self.name, self.taps = name, taps
        self.kv_specs: tuple[KVSpec, ...] = (KVSpec(1, 2, torch.float32),)
        self.bound = 0

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        self.bound += 1

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Any:
        return self.name


def point(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text("{}")
    (folder / "current").unlink(missing_ok=True)
    (folder / "current").symlink_to(name)


def test_heads_are_exchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    fakes: dict[str, Fake] = {"b": Fake("b"), "narrow": Fake("narrow", (1,))}

    def load(path: Path) -> Drafter:
        if path.name not in fakes:
            raise ValueError("made for another model")
        return fakes[path.name]

    flushed: list[str] = []
    first = Fake("a")
    head = ExchangeableHead(first, tmp_path, load, lambda: now[0])
    head.exchanged = lambda: flushed.append("once")
    head.bind((), torch.zeros(1, 1, dtype=torch.int64))
    assert first.bound == 1 and head.scratch(Plan(3, 2, 6)) == 4

    def guessed_by(later: float) -> object:
        now[0] += later
        seen: Any = None
        return head.propose(seen, seen, PLAN, seen)

    assert guessed_by(LOOK_S) == "a"  # there is nothing yet
    point(tmp_path, "b")
    assert guessed_by(LOOK_S / 2) == "a" and guessed_by(LOOK_S) == "b"
    assert fakes["b"].bound == 1 and flushed == ["once"]
    assert guessed_by(LOOK_S) == "b" and fakes["b"].bound == 1
    with caplog.at_level(logging.ERROR):
        point(tmp_path, "broken")
        assert guessed_by(LOOK_S) == "b" and "another model" in caplog.text
        point(tmp_path, "narrow")
        assert guessed_by(LOOK_S) == "b" and "other sizes" in caplog.text
    assert flushed == ["once"]
