"""The training loop: batches in, steps of AdamW out, checkpoints that a run goes on from.

Warm-up and cosine decay follow the share of the pairs to be trained, gradients are gathered over
several small batches, and everything random follows from the seed. A checkpoint is one safetensors
file (weights, moments, place in the data). Knows no files of captures and draws nothing: what
happens is told to a callback.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_serve.draft.train.corpus import Corpus
from spec_serve.draft.train.lesson import Lesson
from spec_serve.draft.train.unroll import Example


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a head is trained.

    pairs: trained in all, over as many epochs as that takes. unrolled: steps of training-time test,
    or guessed places of a block, each weighing `fade` times the one before. batch_pairs: per
    forward, `gather` of which make one step. learning_rate: at the end of the warm-up, a share
    `warm_up` of all pairs; `last_rate` of it is left at the end. train_rows: also the head's output
    rows, at a rate of rows_rate times the others'; fuse_rate: the same of the map that joins the
    features, which has the most inputs and the best start. half: products in bfloat16.
    """

    pairs: int = 2_000_000
    unrolled: int = 3
    fade: float = 0.8
    batch_pairs: int = 512
    gather: int = 1
    learning_rate: float = 2e-4
    last_rate: float = 0.05
    warm_up: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    train_rows: bool = False
    rows_rate: float = 0.3
    fuse_rate: float = 0.3
    half: bool = True
    seed: int = 1

    def check(self) -> None:
        """Raise ValueError naming the first option that is wrong."""
        for name in ("pairs", "unrolled", "batch_pairs", "gather"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')}: must be at least 1")
        if not 0.0 < self.learning_rate < 1.0:
            raise ValueError(f"learning-rate: must be in (0, 1), got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a run is: optimiser steps, pairs trained, and the next batch of which epoch."""

    step: int = 0
    pairs: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """One optimiser step: loss and share of agreement per unrolled step, the learning rate."""

    place: Place
    rate: float
    norm: float
    loss: tuple[float, ...]
    agreed: tuple[float, ...]


@dataclass(slots=True)
class _Sums:
    loss: Tensor | None = None
    agreed: Tensor | None = None
    pairs: Tensor | None = None
    counted: Tensor | None = None
    examples: list[Example] = field(default_factory=list)


class Trainer:
    """A head, its optimiser and its place in the data."""

    def __init__(self, lesson: Lesson, options: TrainOptions) -> None:
        options.check()
        head = self.head = lesson.head
        self.options, self.place = options, Place()
        self._lesson = lesson
        rows = head["lm_head"].requires_grad_(options.train_rows)
        groups: list[dict[str, Any]] = [
            {"params": head.others("lm_head", "fc"), "share": 1.0},
            {"params": [head["fc"]], "share": options.fuse_rate},
        ]
        if options.train_rows:
            groups.append({"params": [rows], "share": options.rows_rate})
        self._optimiser = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )

    def rate(self) -> float:
        """The learning rate of the next step."""
        options = self.options
        done = min(self.place.pairs / options.pairs, 1.0)
        if done < options.warm_up:
            return options.learning_rate * (0.05 + 0.95 * done / options.warm_up)
        after = (done - options.warm_up) / max(1.0 - options.warm_up, 1e-9)
        fall = 0.5 * (1.0 + math.cos(math.pi * after))
        return options.learning_rate * (options.last_rate + (1.0 - options.last_rate) * fall)

    @property
    def done(self) -> bool:
        """Whether all pairs have been trained."""
        return self.place.pairs >= self.options.pairs

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """What products run in: use as a context."""
        kind = self.head["fc"].device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.half)

    def run(self, corpus: Corpus, told: Callable[[Told], bool]) -> None:
        """Train until all pairs are, or `told` says False. It may save in between."""
        for batches, place in self._gathered(corpus):
            happened = self._step(batches, place)
            if not told(happened) or self.done:
                return

    def _gathered(self, corpus: Corpus) -> Iterator[tuple[list[list[Example]], Place]]:
        """The batches of one step each, and the place in the data behind them."""
        options = self.options
        while True:
            epoch, skipped = self.place.epoch, self.place.batch
            held: list[list[Example]] = []
            count = skipped
            for number, batch in enumerate(
                corpus.batches(options.batch_pairs, options.seed, epoch)
            ):
                if number < skipped:
                    continue
                held.append(batch)
                count = number + 1
                if len(held) == options.gather:
                    yield held, Place(epoch=epoch, batch=count)
                    held = []
            if held:
                yield held, Place(epoch=epoch, batch=count)
            self.place = replace(self.place, epoch=epoch + 1, batch=0)

    def _step(self, batches: list[list[Example]], behind: Place) -> Told:
        options = self.options
        rate = self.rate()
        for group in self._optimiser.param_groups:
            group["lr"] = rate * group["share"]
        self._optimiser.zero_grad(set_to_none=True)
        fade = torch.tensor([options.fade**i for i in range(options.unrolled)])
        total = sum(_pairs(batch) for batch in batches)
        loss = agreed = pairs = counted = torch.zeros(options.unrolled)
        for batch in batches:
            with self.precision():
                found = self._lesson(batch, self.place.step)
            weighed = (found.loss * fade.to(found.loss.device)).sum() / total
            torch.autograd.backward(weighed)
            loss = loss + found.loss.detach().cpu()
            agreed, pairs = agreed + found.agreed.cpu(), pairs + found.pairs
            counted = counted + found.counted.cpu()
        trained = [p for group in self._optimiser.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, options.clip))
        self._optimiser.step()
        self.place = replace(behind, step=self.place.step + 1, pairs=self.place.pairs + total)
        mean = loss / counted.clamp_min(1)
        return Told(self.place, rate, norm, tuple(mean.tolist()), tuple((agreed / pairs).tolist()))

    def save(self, path: Path, **more: Any) -> None:
        """Write a checkpoint; the file is replaced only once the new one is whole."""
        tensors: dict[str, Tensor] = {"scale": self.head.scale}
        for name, held in self.head.weights.items():
            tensors["weight/" + name] = held.detach().contiguous()
            for key, value in self._optimiser.state.get(held, {}).items():
                tensors[f"{key}|{name}"] = value.detach().contiguous()
        told = {"place": asdict(self.place), "options": asdict(self.options), **more}
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, {"training": json.dumps(told)})
        os.replace(unfinished, path)

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns what else was written into it.

        ValueError if it belongs to a head of other sizes."""
        with safe_open(path, "pt") as opened:
            told: dict[str, Any] = json.loads(opened.metadata()["training"])
            names = set(opened.keys())
            if names and {"weight/" + name for name in self.head.weights} - names:
                raise ValueError(f"{path.name}: holds a head of another kind or depth")
            self.head.scale.copy_(opened.get_tensor("scale"))
            for name, held in self.head.weights.items():
                found = opened.get_tensor("weight/" + name)
                if found.shape != held.shape:
                    raise ValueError(f"{path.name}: {name} has shape {list(found.shape)}, this "
                                     f"head {list(held.shape)}")  # fmt: skip
                with torch.no_grad():
                    held.copy_(found)
                state = {
                    key: opened.get_tensor(f"{key}|{name}").to(
                        "cpu" if key == "step" else held.device
                    )
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}|{name}" in names
                }
                if state and held.requires_grad:
                    self._optimiser.state[held] = state
        self.place = Place(**told["place"])
        return told


def _pairs(batch: list[Example]) -> int:
    return sum(len(example.tokens) - 2 - example.first for example in batch)
