"""Features of a target on disk: what it computed at each token, in shards of bounded size.

A `Capturer` runs sequences through any model that steps run and reads its tapped boundaries, the
state its head reads, its likeliest token and the logarithm of its softmax's denominator. Shards are
safetensors files, so a run that was broken off goes on with the sequences it lacks. Knows nothing
of heads or of training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.train.answers import Answer
from spec_serve.kernels.base import AttentionBackend
from spec_serve.target.model import Model

CHUNK = 128
"""Tokens per forward: the logits of so many are held at once."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One sequence of n tokens as the target saw it.

    number: of its task. start: where its answer begins. tokens: [n] int32. taps: [n, T * H]
    float16, the boundaries side by side. hidden: [n, H] float16 after the final norm. best: [n]
    int32, the likeliest next token. mass: [n] float32, log-sum-exp of the logits.
    """

    number: int
    start: int
    tokens: Tensor
    taps: Tensor
    hidden: Tensor
    best: Tensor
    mass: Tensor


class Capturer:
    """Runs one sequence after the other; `context` tokens at most."""

    def __init__(
        self, model: Model, attention: AttentionBackend, taps: tuple[int, ...], context: int
    ) -> None:
        self.taps = taps
        self.context = context
        self._model, self._attention = model, attention
        self._pool = KVPool(model.kv_specs, context, 1, context, model.device)
        self._pool.assign(0, 0, range(1, context + 1))

    def __call__(self, answer: Answer) -> Captured:
        """Everything the target knows about a sequence. ValueError if it is too long."""
        tokens = [*answer.prompt, *answer.answer]
        if len(tokens) > self.context:
            raise ValueError(f"sequence {answer.number}: {len(tokens)} tokens, at most "
                             f"{self.context} can be captured")  # fmt: skip
        taps, hidden, best, mass = [], [], [], []
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            slots = range(first + 1, first + 1 + len(part))
            batch = build_batch([Twig(0, first, chain(part), slots, 0)], self._model.device)
            plan = self._attention.plan(batch, self._pool.table)
            out = self._model.forward(batch, self._pool.layers, plan, self.taps)
            assert out.taps is not None
            taps.append(_half(out.taps))
            hidden.append(_half(out.hidden))
            best.append(out.logits.argmax(-1).int().cpu())
            mass.append(out.logits.float().logsumexp(-1).cpu())
        return Captured(
            answer.number,
            len(answer.prompt),
            torch.tensor(tokens, dtype=torch.int32),
            torch.cat(taps),
            torch.cat(hidden),
            torch.cat(best),
            torch.cat(mass),
        )


def _half(values: Tensor) -> Tensor:
    """In float16; a residual stream's few giants are clipped to its range."""
    return values.clamp(-65504.0, 65504.0).half().cpu()


def write_shards(
    folder: Path,
    answers: Iterable[Answer],
    capturer: Callable[[Answer], Captured],
    *,
    shard_bytes: int = 64 << 20,
    most_bytes: int = 4 << 30,
    told: Callable[[int, int], None] = lambda sequences, tokens: None,
) -> int:
    """Capture the answers that `folder` lacks; returns how many sequences were added.

    A shard is written when it holds shard_bytes; it ends when the folder would exceed most_bytes.
    told: gets (sequences, tokens) captured so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    present = {number for shard in shards(folder) for number in _numbers(shard)}
    used = sum(shard.stat().st_size for shard in shards(folder))
    held: list[Captured] = []
    size = added = tokens = 0
    for answer in answers:
        if answer.number in present:
            continue
        made = capturer(answer)
        bytes_ = made.taps.nbytes + made.hidden.nbytes
        if used + bytes_ > most_bytes:
            break
        held.append(made)
        size, used, added = size + bytes_, used + bytes_, added + 1
        tokens += len(made.tokens)
        told(added, tokens)
        if size >= shard_bytes:
            _write(folder, held)
            held, size = [], 0
    if held:
        _write(folder, held)
    return added


def shards(folder: Path) -> list[Path]:
    """The shards of a folder, in the order in which they were written."""
    return sorted(folder.glob("shard-*.safetensors"))


def _numbers(shard: Path) -> list[int]:
    with safe_open(shard, "pt") as opened:
        numbers: list[int] = opened.get_tensor("number").tolist()
    return numbers


def _write(folder: Path, held: Sequence[Captured]) -> None:
    """A shard under its name only once it is whole."""
    written = shards(folder)
    following = int(written[-1].stem.split("-")[1]) + 1 if written else 0
    path = folder / f"shard-{following:05}.safetensors"
    lengths = torch.tensor([len(one.tokens) for one in held])
    tensors = {
        "number": torch.tensor([one.number for one in held]),
        "start": torch.tensor([one.start for one in held]),
        "lengths": lengths,
        "tokens": torch.cat([one.tokens for one in held]),
        "taps": torch.cat([one.taps for one in held]),
        "hidden": torch.cat([one.hidden for one in held]),
        "best": torch.cat([one.best for one in held]),
        "mass": torch.cat([one.mass for one in held]),
    }
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)


def read_shard(path: Path) -> Iterator[Captured]:
    """The sequences of a shard."""
    with safe_open(path, "pt") as opened:
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    first = 0
    for i, length in enumerate(held["lengths"].tolist()):
        part = slice(first, first + length)
        yield Captured(
            int(held["number"][i]),
            int(held["start"][i]),
            held["tokens"][part],
            held["taps"][part],
            held["hidden"][part],
            held["best"][part],
            held["mass"][part],
        )
        first += length
