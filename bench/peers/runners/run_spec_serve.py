"""spec-serve itself: one engine, asked with speculation off or auto, every answer on its own.

Answers have cache salts of their own, so that none can look at another's text or cache.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from spec_serve.bench.running import run
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.load import build_engine
from spec_serve.spec.request import Speculation


def load(
    options: dict[str, Any],
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Build the engine; `mode` of a question is the speculation."""
    torch.set_num_threads(options["threads"])
    engine, tokenizer = build_engine(
        EngineOptions(
            target=options["model"], max_rows=1, max_context=options["context"],
            draft=options["own_draft"],
        )
    )  # fmt: skip
    numbers = count()

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        answer = run(
            engine, question["ids"], question["max_tokens"], eos=tokenizer.eos_ids,
            speculation=Speculation(mode=question["mode"]), salt=f"peers{next(numbers)}",
        )  # fmt: skip
        return {
            "ids": answer.tokens, "first_s": answer.arrivals[0], "total_s": answer.arrivals[-1],
            "steps": len(answer.steps),
        }  # fmt: skip

    curve = {n: round(engine.builder.cost.at(n), 3) for n in (1, 2, 4, 8, 16, 32, 64)}
    return ask, {"version": torch.__version__ + " torch", "precision": engine.info.dtype,
                 "step_ms": curve}  # fmt: skip
