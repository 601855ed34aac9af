"""Speculation changes no token on the compiled kernels either, in any quantisation.

As tests/test_lossless.py, on models whose weights are held quantised: the bits of a token's logits
must not depend on the tree or the batch it is computed in.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.cpu.attention import NativeAttention
from spec_serve.spec.engine import Engine
from spec_serve.target.native import NativeTransformer, load_native
from tests.engines import engine, prompts, request, run, tokens
from tests.tiny import FAMILIES, noisy_copy, tiny_checkpoint

KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
PROMPT = prompts(1, 20, 24, seed=5)[0]


@cache
def model(family: str = "llama", kind: str = "q8_0") -> NativeTransformer:
    return load_native(tiny_checkpoint(family), 2, kind)


@cache
def near(family: str = "llama", kind: str = "q8_0") -> NativeTransformer:
    return load_native(noisy_copy(tiny_checkpoint(family), 0.25), 1, kind)


def off(family: str = "llama", kind: str = "q8_0") -> Engine:
    return engine(model=model(family, kind))  # type: ignore[arg-type]


def on(draft: str, family: str = "llama", kind: str = "q8_0", width: int = 2) -> Engine:
    if draft == "lookup":
        return engine("lookup", model=model(family, kind))  # type: ignore[arg-type]
    made = model(family, kind) if draft == "self" else near(family, kind)
    drafter = StandaloneDrafter(made, NativeAttention())
    return engine(
        draft, model=model(family, kind), draft=drafter, depth=3, width=width  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_case_01_every_quantisation(kind: str, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 7}
    expected = tokens(off(kind=kind), PROMPT, 40, **options)
    for draft in ("lookup", "self", "near"):
        made = on(draft, kind=kind)
        assert tokens(made, PROMPT, 40, **options) == expected, "cold"
        assert tokens(made, PROMPT, 40, **options) == expected, "cached"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_keys_and_values_of_eight_bits(temperature: float) -> None:
    options = {"temperature": temperature, "seed": 7}
    held = load_native(tiny_checkpoint(), 2, "q8_0", kv=torch.int8)
    expected = tokens(engine(model=held), PROMPT, 40, **options)  # type: ignore[arg-type]
    made = engine("lookup", model=held)  # type: ignore[arg-type]
    drafter = StandaloneDrafter(near(), NativeAttention())
    both = engine("near", model=held, draft=drafter, depth=3, width=2)  # type: ignore[arg-type]
    for other in (made, made, both, both):  # cold and cached
        assert tokens(other, PROMPT, 40, **options) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    options = {"temperature": 0.8, "seed": 1}
    expected = tokens(off(family), PROMPT, 40, **options)
    for draft in ("lookup", "self", "near"):
        made = on(draft, family)
        assert tokens(made, PROMPT, 40, **options) == expected
        assert tokens(made, PROMPT, 40, **options) == expected


@pytest.mark.parametrize("draft", ["lookup", "near"])
def test_a_ragged_batch_and_company(draft: str) -> None:
    asked = [
        request(prompt, 10 + 3 * i, temperature=(0.0, 0.8)[i % 2], seed=i, logprobs=i % 3 or None)
        for i, prompt in enumerate(prompts(8, 3, 60, seed=2))
    ]
    alone = [run(off(), one)[0] for one in asked]
    together = run(on(draft), *asked)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs  # to the last bit


def test_drafts_of_the_compiled_model_are_accepted_whole() -> None:
    (done,) = run(on("self", width=1), request(PROMPT, 40))
    drafted = sum(step.drafted for step in done.steps[1:-1])
    accepted = sum(step.accepted for step in done.steps[1:-1])
    assert drafted and accepted == drafted


def test_preemption_changes_no_token() -> None:
    asked = [request(p, 40, temperature=0.9, seed=i) for i, p in enumerate(prompts(6, 10, 30))]
    alone = [run(off(), one)[0].tokens for one in asked]
    tight = engine("lookup", model=model(), kv_tokens=160, max_rows=6)  # type: ignore[arg-type]
    assert [done.tokens for done in run(tight, *asked)] == alone
    assert tight.stats().preempted > 0
