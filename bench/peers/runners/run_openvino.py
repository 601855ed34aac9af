"""OpenVINO GenAI, which reads GGUF files of the common families: plain and prompt look-up.

Prompt look-up is a choice made at loading, so there is one pipeline per mode, built when first
asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy
import openvino
import openvino_genai

LOOKUP, NGRAM = 5, 3


def load(
    options: dict[str, Any],
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Pipelines are built with the first question of their mode."""
    pipelines: dict[str, Any] = {}

    def pipeline(mode: str) -> Any:
        if mode not in pipelines:
            more = {"prompt_lookup": True} if mode == "lookup" else {}
            pipelines[mode] = openvino_genai.LLMPipeline(
                options["model"], "CPU", INFERENCE_NUM_THREADS=options["threads"], **more
            )
        return pipelines[mode]

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        held = pipeline(question["mode"])
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = question["max_tokens"]
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = set(options["eos"])
        if question["mode"] == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP, NGRAM
        ids = openvino.Tensor(numpy.array([question["ids"]], numpy.int64))
        begun = time.perf_counter()
        made = held.generate(ids, config)
        took = time.perf_counter() - begun
        first = made.perf_metrics.get_ttft().mean / 1e3
        return {"ids": list(made.tokens[0]), "first_s": first, "total_s": took}

    return ask, {"version": openvino_genai.__version__}
