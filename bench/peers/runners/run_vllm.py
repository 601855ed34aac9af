"""vLLM's CPU build on the GGUF file: plain, or n-gram look-up (another engine process is needed).

One engine per process: `modes` of the options has one entry. Times are those of vLLM's own
metrics where it gives them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import vllm

LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


def load(
    options: dict[str, Any],
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Start the engine; takes minutes."""
    (mode,) = options["modes"]
    engine = vllm.LLM(
        model=options["model"], max_model_len=options["context"], max_num_seqs=1,
        enable_prefix_caching=False, disable_log_stats=False,
        speculative_config=dict(LOOKUP) if mode == "lookup" else None,
    )  # fmt: skip

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        wanted = vllm.SamplingParams(
            temperature=0, max_tokens=question["max_tokens"], stop_token_ids=options["eos"],
            detokenize=False,
        )  # fmt: skip
        begun = time.perf_counter()
        (made,) = engine.generate(
            {"prompt_token_ids": question["ids"]}, wanted, use_tqdm=False
        )
        took = time.perf_counter() - begun
        first = getattr(made.metrics, "first_token_latency", 0.0)
        if not first:
            raise RuntimeError("vLLM gave no time of the first token")
        return {"ids": list(made.outputs[0].token_ids), "first_s": first, "total_s": took}

    return ask, {"version": vllm.__version__}
