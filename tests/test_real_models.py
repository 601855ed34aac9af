"""Real models: the known greedy ids, and speculation that changes none of them.

The numbers were produced by the Hugging Face implementation from the same weights. The models are
fetched on first use (SmolLM2-135M 98 MB, Qwen2.5-Coder-0.5B 491 MB).
"""

from __future__ import annotations

from functools import cache

import pytest

from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.engine import Engine
from spec_serve.spec.load import build_engine
from spec_serve.spec.request import Request, Sampling, Speculation, Stopping
from spec_serve.target.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

KNOWN = {
    "smollm2-135m-instruct": (
        [19556, 17, 1073, 416, 339, 4237, 346, 1834, 47, 2],
        {19556: 31.7804, 26843: 29.7738, 9085: 29.3643, 57: 28.7478, 22234: 28.3426},
    ),
    "qwen2.5-coder-0.5b-instruct": (
        [9707, 0, 2585, 646, 358, 7789, 498, 3351, 30, 151645],
        {9707: 23.1921, 13048: 20.2324, 18665: 17.4054, 40: 17.0709, 108386: 17.0014},
    ),
}

QUANTISED = {"smollm2-135m-instruct": "q4_1", "qwen2.5-coder-0.5b-instruct": "q5_0"}


@cache
def loaded(name: str, dtype: str = "auto") -> tuple[Engine, Tokenizer]:
    return build_engine(EngineOptions(target=name, dtype=dtype, max_rows=4, kv_tokens=4096))


def ask(
    name: str, text: str, mode: str, max_tokens: int, logprobs: int | None = None,
    dtype: str = "auto", **how: float,
) -> tuple[list[int], list[tuple[int, float]], int]:  # fmt: skip
    engine, tokenizer = loaded(name, dtype)
    request = Request(
        f"{mode}-{text[:16]}-{how}",
        tokenizer.render_chat([{"role": "user", "content": text}]),
        Sampling(**how),  # type: ignore[arg-type]
        Stopping(max_tokens=max_tokens, eos=tokenizer.eos_ids),
        Speculation(mode=mode),  # type: ignore[arg-type]
        logprobs=logprobs,
        salt=mode,
    )
    (done,) = engine.generate([request])
    engine.store.check()
    first = done.logprobs[0].top if done.logprobs else []
    return done.tokens, first, sum(step.accepted for step in done.steps)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("mode", ["off", "max"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-2), ("auto", 5e-2)])
def test_greedy_ids_and_logits_are_the_known_ones(
    name: str, mode: str, dtype: str, tolerance: float
) -> None:
    ids, logits = KNOWN[name]
    engine, _ = loaded(name, dtype)
    # What nobody chooses on a CPU is the file's own quantisation.
    assert engine.info.dtype == ("float32" if dtype == "float32" else QUANTISED[name])
    tokens, first, _ = ask(name, "Hi", mode, 16, 5, dtype)
    assert tokens == ids
    assert first[0][0] == ids[0]
    found = dict(first)
    best = max(logits.values())
    for token, logit in list(logits.items())[:3]:
        assert found[token] - first[0][1] == pytest.approx(logit - best, abs=tolerance)
    if dtype == "float32":
        assert [token for token, _ in first] == list(logits)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "seed": 5}], ids=str)
def test_speculation_changes_no_token_of_smollm2(how: dict[str, float]) -> None:
    text = (
        "Repeat this code and then once more with `total` renamed to `amount`:\n"
        "def add(values):\n    total = 0\n    for value in values:\n        total += value\n"
        "    return total\n"
    )
    name = "smollm2-135m-instruct"
    off, _, none = ask(name, text, "off", 72, **how)
    auto, _, _ = ask(name, text, "auto", 72, **how)
    most, _, accepted = ask(name, text, "max", 72, **how)
    assert off == auto == most
    assert none == 0 and accepted > 5
