"""transformers' `generate` on the GGUF file: plain, assisted by a draft model, prompt look-up.

The weights are widened to bfloat16 or float32, as transformers does with a GGUF file: it has no
kernels for the quantised ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

LOOKUP = 10  # guesses, as its documentation suggests


class Clock:
    """A streamer that keeps when the tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.times: list[float] = []
        self.first = 0  # tokens of the first step
        self._calls = 0

    def put(self, value: Any) -> None:
        """Tokens have come."""
        self._calls += 1
        if self._calls == 2:
            self.first = int(value.numel())
        if self._calls > 1:
            self.times.append(time.perf_counter() - self.begun)

    def end(self) -> None:
        """All have come."""


def load(
    options: dict[str, Any],
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Read the model, and the draft if there is one."""
    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options.get("dtype") or "bfloat16")

    def read(name: str) -> Any:
        path = Path(name)
        read_from: Any = transformers.AutoModelForCausalLM.from_pretrained
        if path.is_dir():
            return read_from(path, dtype=dtype)
        return read_from(path.parent, gguf_file=path.name, dtype=dtype)

    model = read(options["model"])
    draft = read(options["draft"]) if options["draft"] else None
    eos = options["eos"]

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([question["ids"]])
        more: dict[str, Any] = {}
        if question["mode"] == "assisted":
            more["assistant_model"] = draft
        elif question["mode"] == "lookup":
            more["prompt_lookup_num_tokens"] = LOOKUP
        clock = Clock()
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clock,
                max_new_tokens=question["max_tokens"], eos_token_id=eos, pad_token_id=eos[0],
                **more,
            )  # fmt: skip
        return {
            "ids": made[0, ids.shape[1] :].tolist(), "first_s": clock.times[0],
            "total_s": clock.times[-1], "first_tokens": clock.first,
        }  # fmt: skip

    about = {"version": transformers.__version__, "precision": str(dtype).removeprefix("torch.")}
    return ask, about
