"""Whole engines on a GPU: idle time between steps, tokens a second with an oracle as drafter.

At the highest temperature what a target draws is nearly the arg-max of the noise alone, which a
drafter knows beforehand: so any acceptance can be had from random weights, whatever rounding does
(one guess in about seventy is wrong by itself). The oracle spoils its guesses by given rates. Its
own time is that of the noise, less than a head's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Drafter, Noise, Plan, Seen, Trees
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Request, Sampling, Speculation, Stopping
from spec_serve.target.model import Transformer

HOT = 100.0
"""The highest temperature a request may have."""

RATE, DEPTH = 0.8, 7
"""Acceptance of each guess, given those before it, and guesses of a chain: 4.2 tokens a step, what
is published for EAGLE-3."""

_MIX = 0x9E3779B1


@dataclass(slots=True)
class Oracle:
    """Drafts chains that are right at depth d with probability rates[d], given those above."""

    vocab: int
    rates: Sequence[float]
    name: str = "oracle"
    kv_specs: tuple[KVSpec, ...] = ()
    taps: tuple[int, ...] = ()
    _kept: dict[str, Tensor] = field(default_factory=dict)

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """Nothing is kept."""
        rates = torch.tensor(list(self.rates), dtype=torch.float64)
        self._kept = {
            "edge": (rates * (1 << 20)).long().to(table.device),  # [D]
            "score": rates.log().cumsum(0).float().to(table.device),  # [D]
        }

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """The noise's own choices; see draft/base.py."""
        if not plan.nodes:
            return None
        rows, depth = seen.length.shape[0], min(plan.depth, len(self.rates), plan.nodes)
        device = seen.length.device
        row = torch.arange(rows, device=device)
        flat = torch.zeros((rows, self.vocab), device=device)
        right = torch.stack(
            [noise.add(flat, row, seen.length + d).argmax(-1) for d in range(depth)], 1
        )  # [B, D]
        at = seen.length.unsqueeze(1) + torch.arange(depth, device=device)
        drawn = ((at * _MIX) & 0xFFFF_FFFF) >> 12  # [B, D], 20 bits
        tokens = torch.where(drawn < self._kept["edge"][:depth], right, (right + 1) % self.vocab)
        return Trees(
            tokens=tokens,
            parents=torch.arange(-1, depth - 1, device=device).expand(rows, depth),
            score=self._kept["score"][:depth].expand(rows, depth),
            count=torch.full((rows,), depth, dtype=torch.int64, device=device),
        )


def engine_for(
    model: Transformer, rows: int, context: int, drafter: Drafter | None, graphs: bool
) -> Engine:
    """An engine that grows chains of the oracle every step, or none."""
    options = EngineOptions(
        target="random", kv_tokens=rows * context, max_rows=rows, max_context=context,
        max_nodes=DEPTH, speculation="off" if drafter is None else "max",
        cuda_graphs="auto" if graphs else "off",
    )  # fmt: skip
    made = assemble(model, options, drafter=drafter, lookup=False)
    if drafter is not None:
        made.builder.grow_always(DEPTH, 1)
    return made


def asked(rows: int, prompt: int, tokens: int) -> list[Request]:
    """Requests whose choices are the noise's."""
    return [
        Request(
            id=f"oracle-{i}", prompt=[(7 * i + 13 * j) % 250 + 1 for j in range(prompt)],
            sampling=Sampling(temperature=HOT, seed=i + 1),
            stopping=Stopping(max_tokens=tokens, ignore_eos=True), speculation=Speculation(),
        )
        for i in range(rows)
    ]  # fmt: skip


def served(model: Transformer, name: str, small: bool, over: Callable[[], bool]) -> Iterator[Any]:
    """Tokens a second of whole engines, without guesses and with the oracle's, by rows."""
    prompt, tokens = (8, 12) if small else (512, 256)
    for rows in (1, 2) if small else (1, 8, 32):
        plain = 0.0
        for kind in ("off", "oracle"):
            if over():
                return
            oracle = Oracle(model.config.vocab, [RATE] * DEPTH) if kind == "oracle" else None
            made = engine_for(model, rows, prompt + tokens + 64, oracle, True)
            made.generate(asked(rows, prompt, 16))  # graphs of drafting are recorded in it
            before = made.stats()
            begun = perf_counter()
            done = made.generate(asked(rows, prompt, tokens))
            seconds = perf_counter() - begun
            steps = made.stats().steps - before.steps
            speed = sum(len(one.tokens) for one in done) / seconds
            plain = plain or speed
            yield {"model": name, "rows": rows, "guesses": kind, "tokens/s": speed,
                   "tokens/step/row": sum(len(one.tokens) for one in done) / steps / rows,
                   "of off": speed / plain}  # fmt: skip
            del made


def gaps(model: Transformer, name: str, small: bool, over: Callable[[], bool]) -> Iterator[Any]:
    """Microseconds a step in which the device does nothing, and the host's share of a step."""
    prompt, tokens = (8, 8) if small else (512, 64)
    for rows in (1, 2) if small else (1, 32):
        for graphs in (True, False):
            if over():
                return
            oracle = Oracle(model.config.vocab, [RATE] * DEPTH)
            made = engine_for(model, rows, prompt + tokens + 64, oracle, graphs)
            made.generate(asked(rows, prompt, tokens))
            for request in asked(rows, prompt, tokens):
                made.submit(request)
            while not made.idle() and not all(row.emitted for row in made.scheduler.rows()):
                made.step()
            before = made.stats()
            idle = _idle_us(made, model.device)
            after = made.stats()
            steps = max(after.steps - before.steps, 1)
            yield {"model": name, "rows": rows, "graphs": "yes" if graphs else "no",
                   "idle us": None if idle is None else idle / steps,
                   "host us": (after.host_us - before.host_us) / steps}  # fmt: skip
            del made


def _idle_us(engine: Engine, device: torch.device) -> float | None:
    """Run an engine dry; between its first and last launch, how long no kernel or copy ran."""
    if device.type != "cuda":
        while not engine.idle():
            engine.step()
        return None
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        while not engine.idle():
            engine.step()
        torch.cuda.synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    idle, end = 0.0, spans[0][1] if spans else 0.0
    for start, stop in spans:
        idle += max(start - end, 0.0)
        end = max(end, stop)
    return idle
