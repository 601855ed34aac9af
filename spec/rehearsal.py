"""A short trial of a drafter before it serves: does it guess better than chance?

Speculation is exact, so a head that was made for another model, or reads the wrong layers, would
only ever show as an acceptance of nothing. Here it answers built-in prompts with one guess a step,
in a small engine of its own, and what comes out is told. Knows engines and texts, no formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from spec_serve.draft.base import Drafter
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.head_file import ReadsTaps
from spec_serve.kernels.base import AttentionBackend
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.spec.request import Request, Sampling, Speculation, Stopping
from spec_serve.target.model import Model

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a lost ship.",
    "How do I reverse a list in Python? Show an example.",
)
TOKENS = 20
"""Tokens each prompt is answered with."""

LEAST = 0.06
"""Share of right guesses that any head of use exceeds."""


class Speech(Protocol):
    """What is needed of a tokenizer."""

    @property
    def chat_template(self) -> str | None: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """guesses, right: of one guess a step. common: share of the commonest token in what was said,
    which a head that always says the same reaches. advice: what would probably mend it."""

    guesses: int
    right: int
    common: float
    advice: str = ""

    @property
    def rate(self) -> float:
        """Share of guesses that were right."""
        return self.right / self.guesses if self.guesses else 0.0

    @property
    def by_chance(self) -> bool:
        """True if the head shows no sign of knowing the target."""
        return self.guesses >= 8 and self.rate < max(LEAST, 1.25 * self.common)

    def told(self, name: str) -> str:
        """One line for people."""
        counted = f"{self.right} of {self.guesses} first guesses right"
        if not self.by_chance:
            return f"{name}: {counted} on built-in prompts"
        reason = self.advice or "it was probably made for another model, or is not trained yet"
        return f"{name} guesses no better than chance ({counted} on built-in prompts): {reason}"


def rehearse(
    target: Model,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: EngineOptions,
    attention: AttentionBackend | None = None,
    vocab_size: int = 0,
) -> Rehearsal:
    """Try a drafter on token sequences; binds it to a pool that is gone afterwards."""
    found = _run(target, drafter, prompts, options, attention, vocab_size)
    if not found.by_chance or not isinstance(drafter, ReadsTaps):
        return found
    config = drafter.config
    if config.final_norm:
        return replace(found, advice=_ADVICE.get(config.format, ""))
    said = drafter.taps
    for step in (1, -1):
        taps = tuple(tap + step for tap in said)
        if not all(0 <= tap <= target.config.layers for tap in taps):
            continue
        drafter.taps = taps
        other = _run(target, drafter, prompts, options, attention, vocab_size)
        drafter.taps = said
        if not other.by_chance and other.right > 2 * found.right:
            given = ",".join(map(str, taps))
            advice = (
                f"its configuration counts layers the other way; with --draft-taps {given}"
                f" {other.right} of {other.guesses} are right"
            )
            return replace(found, advice=advice)
    return found


_ADVICE = {
    "nextn": "the module was probably trained with another target, or its tensors were replaced",
}


def _run(
    target: Model, drafter: Drafter, prompts: Sequence[Sequence[int]], options: EngineOptions,
    attention: AttentionBackend | None, vocab_size: int,
) -> Rehearsal:  # fmt: skip
    context = min(target.config.max_context, max(map(len, prompts)) + TOKENS + 8)
    small = replace(
        options, kv_tokens=len(prompts) * (context + 8), max_rows=len(prompts),
        max_context=context, max_nodes=1, speculation="max", block_events=0,
        cuda_graphs="off",
    )  # fmt: skip
    flat = CostCurve([(1, 1.0), (64, 1.001)])
    engine = assemble(
        target, small, drafter=drafter, lookup=False, attention=attention, vocab_size=vocab_size,
        cost=flat,
    )  # fmt: skip
    engine.builder.grow_always(1, 1)
    stopping = Stopping(max_tokens=TOKENS, ignore_eos=True)
    asked = [
        Request(
            id=f"rehearsal-{i}", prompt=list(prompt), sampling=Sampling(), stopping=stopping,
            speculation=Speculation(mode="max"),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    done = engine.generate(asked)
    steps = [step for one in done for step in one.steps]
    said = Counter(token for one in done for token in one.tokens)
    total = sum(said.values())
    common = said.most_common(1)[0][1] / total if total else 0.0
    return Rehearsal(sum(s.drafted for s in steps), sum(s.accepted for s in steps), common)
