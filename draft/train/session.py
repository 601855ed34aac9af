"""One training run from folder to head: where things lie, what is done next, what is kept.

The folder holds answers, captured shards, the head's vocabulary, the last checkpoint, the best one
by held-out acceptance, and a log with its plot. Every part goes on where it was broken off. Knows
no engine and draws no bars: who answers prompts and who is told are the caller's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_serve.draft.train.acceptance import Acceptance
from spec_serve.draft.train.answers import Answer, read_answers
from spec_serve.draft.train.block import BlockHead, block_shape, warm_block
from spec_serve.draft.train.capture import Capturer, shards, write_shards
from spec_serve.draft.train.corpus import Corpus
from spec_serve.draft.train.head import EagleHead, HeadShape
from spec_serve.draft.train.lesson import BlockLesson, EagleLesson, Lesson, acceptance
from spec_serve.draft.train.loop import Told, Trainer, TrainOptions
from spec_serve.draft.train.plot import plot
from spec_serve.draft.train.start import Start, usual_size
from spec_serve.draft.train.unroll import Example, Teacher
from spec_serve.draft.train.vocabulary import choose, membership
from spec_serve.draft.train.warm import target_parts, warm_start
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Weights

HELD_SEQUENCES = 40
"""Held-out answers an evaluation reads."""

SHORTEST = 6
"""Tokens an answer needs to be worth anything."""

ANSWERED, ASKED = 4, 1
"""What an occurrence counts in an answer and in a prompt when the vocabulary is chosen."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a run's things lie."""

    root: Path

    @property
    def answers(self) -> Path:
        return self.root / "answers.jsonl"

    @property
    def vocabulary(self) -> Path:
        return self.root / "vocabulary.safetensors"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.safetensors"

    @property
    def best(self) -> Path:
        return self.root / "best.safetensors"

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    def captured(self, held: bool) -> Path:
        """The shards that are trained on, or those that are only measured on."""
        return self.root / ("held" if held else "train")


def capture(
    folder: Folder,
    capturer: Capturer,
    most_bytes: int,
    told: Callable[[int, int], None] = lambda sequences, tokens: None,
) -> int:
    """Capture every answer that has none yet; returns how many sequences were added."""
    added = 0
    for held in (True, False):
        added += write_shards(
            folder.captured(held),
            (
                one
                for one in read_answers(folder.answers)
                if one.held == held
                and len(one.answer) >= SHORTEST
                and len(one.prompt) + len(one.answer) <= capturer.context
            ),
            capturer,
            most_bytes=most_bytes // (8 if held else 1),
            told=told,
        )
    return added


def head_shape(config: ModelConfig, draft_vocab: int, taps: tuple[int, ...]) -> HeadShape:
    """A head as wide as its target."""
    return HeadShape(
        hidden=config.hidden,
        intermediate=config.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        draft_vocab=draft_vocab,
        taps=taps,
        eps=config.eps,
        theta=config.rope.theta,
        max_positions=config.max_context,
    )


def vocabulary(folder: Folder, config: ModelConfig, size: int, ends: Iterable[int]) -> Tensor:
    """The head's ids [D], chosen once by how often the answers hold them, then kept."""
    if folder.vocabulary.exists():
        kept: Tensor = load_file(folder.vocabulary)["kept"]
        if len(kept) != size:
            raise ValueError(
                f"draft-vocab: this folder's head has {len(kept)} ids, not {size};"
                " another size needs another folder"
            )
        return kept

    def counted(answers: Iterable[Answer]) -> Iterable[tuple[list[int], int]]:
        for one in answers:
            if not one.held:
                yield list(one.answer), ANSWERED
                yield list(one.prompt), ASKED

    kept = choose(counted(read_answers(folder.answers)), size, config.vocab, list(ends))
    save_file({"kept": kept}, folder.vocabulary)
    return kept


@dataclass(frozen=True, slots=True)
class Ready:
    """A head about to be trained, and what it is measured on."""

    trainer: Trainer
    lesson: Lesson
    kept: Tensor
    corpus: Corpus
    held: Corpus

    def acceptance(self, depth: int = 5) -> Acceptance:
        """Of the held-out answers, as the head is now."""
        examples = self.held.examples(HELD_SEQUENCES)
        with self.trainer.precision():
            return acceptance(self.lesson, examples, depth)


def prepare(
    folder: Folder,
    weights: Weights,
    options: TrainOptions,
    *,
    taps: tuple[int, ...],
    draft_vocab: int,
    ends: Collection[int],
    start: Start | None = None,
    block_layers: int = 0,
    candidates: int = 2048,
    warm_sequences: int = 400,
    device: torch.device | str = "cpu",
) -> Ready:
    """A head from the folder's checkpoint, or a new one begun from its target or from `start`.

    block_layers: a block drafter of so many layers that guesses options.unrolled places; 0 = an
    EAGLE-3 head. With `start` taps and draft_vocab are that head's. ValueError for a folder without
    captures and for one that holds a head of other sizes.
    """
    config = ModelConfig.from_checkpoint_config(weights.config)
    kept = vocabulary(folder, config, draft_vocab, ends) if start is None else start.kept
    known = membership(kept, config.vocab)
    corpus = Corpus(folder.captured(False), known, options.unrolled, device)
    held = Corpus(folder.captured(True), known, options.unrolled, device)
    parts = target_parts(weights)
    shape = head_shape(config, draft_vocab, taps) if start is None else start.shape
    going_on = folder.checkpoint.exists()
    first: list[Example] = []
    if not going_on:
        first = Corpus(folder.captured(False), known, options.unrolled).examples(warm_sequences)
    kind = torch.bfloat16 if options.half else torch.float32
    embedding = parts.embedding.to(device, kind)
    teacher = Teacher(parts.rows[kept].to(device, kind), candidates, options.seed)
    there = kept.to(device)
    lesson: Lesson
    if block_layers:
        block = BlockHead(block_shape(shape, block_layers, options.unrolled + 1, ends))
        if not going_on:
            warm_block(block, parts, kept, first, options.seed)
        lesson = BlockLesson(block.to(device), embedding, teacher, there, options.seed)
    else:
        head = EagleHead(shape)
        if start is not None and not going_on:
            head.take(start.tensors, usual_size(first))
        elif not going_on:
            warm_start(head, parts, kept, first, options.seed)
        lesson = EagleLesson(head.to(device), embedding, teacher, there, options.unrolled)
    trainer = Trainer(lesson, options)
    if going_on:
        trainer.load(folder.checkpoint)
    return Ready(trainer, lesson, there, corpus, held)


def train(
    folder: Folder,
    ready: Ready,
    every: int,
    told: Callable[[Told, Acceptance | None], bool],
) -> Acceptance:
    """Train to the end, or until `told` says False; returns the best acceptance.

    Every `every` steps, and at the end, the head is measured, the checkpoint written, the log and
    its plot continued, and the checkpoint kept as the best one if it is. What the head began as is
    measured too, and never kept: `Folder.best` holds only what is better than the start.
    """
    trainer = ready.trainer
    log = read_log(folder)
    if not log:
        begun = {"step": 0, "pairs": 0, **asdict(ready.acceptance())}
        _note(folder, log, begun)
    best = max((Acceptance(tuple(e["depths"]), e["per_step"]) for e in log), default=None,
               key=lambda found: found.per_step)  # fmt: skip

    def evaluate(happened: Told) -> Acceptance:
        nonlocal best
        found = ready.acceptance()
        trainer.save(folder.checkpoint, per_step=found.per_step)
        if best is None or found.per_step > best.per_step:
            best = found
            shutil.copyfile(folder.checkpoint, folder.best)
        entry = {
            "step": happened.place.step,
            "pairs": happened.place.pairs,
            "rate": happened.rate,
            "loss": list(happened.loss),
            "agreed": list(happened.agreed),
            **asdict(found),
        }
        _note(folder, log, entry)
        return found

    def step(happened: Told) -> bool:
        due = happened.place.step % every == 0 or trainer.done
        found = evaluate(happened) if due else None
        goes_on = told(happened, found)
        if not goes_on and not due:
            evaluate(happened)
        return goes_on

    if not trainer.done:
        trainer.run(ready.corpus, step)
    return best or ready.acceptance()


def _note(folder: Folder, log: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Add a line to the log, and draw its plot anew."""
    log.append(entry)
    with folder.log.open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")
    folder.log.with_suffix(".svg").write_text(plot(log), encoding="utf-8")


def read_log(folder: Folder) -> list[dict[str, Any]]:
    """The lines of the log."""
    if not folder.log.exists():
        return []
    return [json.loads(line) for line in folder.log.read_text(encoding="utf-8").splitlines()]


def captured_sequences(folder: Folder) -> bool:
    """Whether there is anything to train on."""
    return bool(shards(folder.captured(False)))
