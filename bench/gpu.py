"""The GPU path in one command: programs compiled, checked against torch, and timed.

Sections: compile (no GPU needed), correct, attention (bytes read against bandwidth), steps (a whole
verify step of known models with random weights against reading them), draw, quantised, gaps (time
the device idles between steps), served (tokens a second with an oracle's guesses). Sections stop
taking up new work when the time given is over, and say so. Prints tables and writes JSON. Where
there is no GPU, `--small` runs the same code on a CPU to show that it works; times mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spec_serve.bench.gpu_cases import Case, Problem, bushy, error, large_cases, make, small_cases
from spec_serve.bench.gpu_steps import gaps, served
from spec_serve.bench.report import table, write_json
from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import TokenTree, root
from spec_serve.kernels.base import AttentionBackend, pick_backend
from spec_serve.kernels.graphs import CudaCapture
from spec_serve.spec.load import pick_device
from spec_serve.spec.runner import graphs_fit
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Transformer, expected_tensors, load_model
from spec_serve.target.operations import operations_for

SECTIONS = ("compile", "correct", "attention", "steps", "draw", "quantised", "gaps", "served")
Record = dict[str, object]

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 40960, "rope_theta": 5e5,
    },
    "Qwen3-8B": _QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "Qwen2.5-1.5B": _QWEN | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "rms_norm_eps": 1e-6, "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "vocab_size": 102400,
        "max_position_embeddings": 40960, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy",
    },
}  # fmt: skip
"""Run where they are asked for. A step reads the experts its tokens chose, so that the time to read
all weights is a bound for many nodes only."""
SMALL = _LLAMA | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Random:
    """A checkpoint of random tensors made where they are wanted: speed does not hang on values."""

    config: Mapping[str, Any]
    device: torch.device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        config = ModelConfig.from_checkpoint_config(self.config)
        found = dict(expected_tensors(config, "model."))
        if not config.tied_head:
            found["lm_head.weight"] = (config.vocab, config.hidden)
        return found

    def values_read(self) -> int:
        """Values a step reads: all but those of an embedding that is not the head too."""
        shapes = self.shapes()
        if "lm_head.weight" in shapes:
            del shapes["model.embed_tokens.weight"]
        return sum(torch.Size(shape).numel() for shape in shapes.values())

    def names(self) -> list[str]:
        return list(self.shapes())

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes()[name]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.shape(name), dtype=dtype, device=self.device) * 0.02


class Meter:
    """Times work on one device, until the time given to the bench is over."""

    def __init__(self, device: torch.device, seconds: float, repeat: int) -> None:
        self.device = device
        self._repeat = repeat
        self._end = perf_counter() + seconds

    def over(self) -> bool:
        """Whether no more work should be taken up."""
        return perf_counter() > self._end

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ms(self, work: Callable[[], object]) -> float:
        """Median wall time of one run, host included, after one that does not count."""
        times: list[float] = []
        for _ in range(self._repeat + 1):
            self.wait()
            begun = perf_counter()
            work()
            self.wait()
            times.append((perf_counter() - begun) * 1e3)
        return median(times[1:])

    def bandwidth(self, size: int) -> float:
        """Bytes per second that reading `size` bytes of float32 reaches."""
        held = torch.ones(size // 4, device=self.device)
        return size / (self.ms(held.sum) * 1e-3)


def correct(device: torch.device, backend: AttentionBackend, small: bool) -> Iterator[Record]:
    """Every case, its largest error in units of what its dtype allows."""
    for case in small_cases()[: 2 if small else None] + ([] if small else large_cases()):
        worst = error(case, backend, device)
        yield {"case": case.name, "error": worst, "good": "yes" if worst < 1 else "NO"}


def attention(meter: Meter, names: Sequence[str], speed: float, small: bool) -> Iterator[Record]:
    """Attention alone, by backend: milliseconds, and the share of bandwidth that K/V is read at."""
    contexts, batches = ((40,), (1, 2)) if small else ((512, 2048, 8192, 32768), (1, 8, 64))
    dtype = torch.float32 if small else torch.bfloat16
    for context in contexts:
        for rows in batches:
            for nodes in (1, 8) if small else (1, 8, 32):
                if meter.over() or context * rows > 300_000:
                    continue
                twig = (context, bushy(nodes, 1) if nodes > 1 else root(1))
                shape = (4, 2, 16) if small else (32, 8, 128)
                case = Case("", (twig,) * rows, *shape, dtype=dtype)
                problem = make(case, meter.device)
                read = 2 * rows * (context + nodes) * shape[1] * shape[2] * dtype.itemsize
                made: Record = {"context": context, "rows": rows, "nodes": nodes}
                for name in names:
                    ms = meter.ms(_planned(problem, pick_backend(meter.device, name)))
                    made[f"{name} ms"] = ms
                    made[f"{name} share"] = read / speed / (ms * 1e-3)
                yield made


def _planned(problem: Problem, backend: AttentionBackend) -> Callable[[], Tensor]:
    plan = backend.plan(problem.batch, problem.table)

    def run() -> Tensor:
        scale = problem.case.head_dim**-0.5
        return plan.attend(problem.q, problem.k, problem.v, problem.kv, scale=scale)

    return run


def steps(
    meter: Meter,
    model: Transformer,
    name: str,
    backend: AttentionBackend,
    floor: float,
    small: bool,
) -> Iterator[Record]:
    """A whole forward, head included, against the milliseconds that reading the weights takes; by
    fused kernels, and as a graph, where an engine would run it so."""
    capture = CudaCapture(meter.device) if graphs_fit(meter.device, backend) else None
    model.operations = operations_for(meter.device)
    contexts, batches = ((32,), (1, 2)) if small else ((512, 2048, 16384), (1, 8, 64))
    base: dict[tuple[int, int], float] = {}
    for context in contexts:
        for rows in batches:
            if context * rows > 140_000:
                continue
            pool = KVPool(model.kv_specs, (context + 128) * rows, rows, context + 128, meter.device)
            for nodes in (1, 4) if small else (1, 2, 4, 8, 16, 32, 64, 128):
                if meter.over() or rows * nodes > 2048:
                    continue
                run = _forward(model, pool, backend, context, rows, nodes)
                ms = meter.ms(run if capture is None else capture.record(run))
                one = base.setdefault((context, rows), ms)
                yield {"model": name, "context": context, "rows": rows, "nodes": nodes, "ms": ms,
                       "of reading weights": ms / floor, "of one node": ms / one}  # fmt: skip
            del pool


def _forward(
    model: Transformer, pool: KVPool, backend: AttentionBackend, context: int, rows: int, nodes: int
) -> Callable[[], None]:
    tree: TokenTree = bushy(nodes, 1) if nodes > 1 else root(1)
    per_row = context + nodes
    pool.table[:rows, :context] = (
        torch.arange(rows * per_row).view(rows, per_row)[:, :context].add(1).to(pool.device)
    )
    twigs = [
        Twig(row, context, tree, range(row * per_row + context + 1, (row + 1) * per_row + 1), 0)
        for row in range(rows)
    ]

    batch = build_batch(twigs, pool.device)

    def run() -> None:
        model.forward(batch, pool.layers, backend.plan(batch, pool.table))

    return run


def draws(meter: Meter, small: bool) -> Iterator[Record]:
    """Drawing from logits in torch and in Triton, which must agree."""
    from spec_serve.kernels import fused_draw
    from spec_serve.kernels.noise import gumbel
    from spec_serve.spec.filters import scaled

    device = meter.device
    for rows in (2,) if small else (1, 32, 256):
        logits = torch.randn(rows, 300 if small else 151_936, device=device) * 3
        warm = torch.ones(rows, dtype=torch.float64, device=device)
        keys = torch.arange(rows, device=device)

        def plain(logits: Tensor = logits, warm: Tensor = warm, keys: Tensor = keys) -> Tensor:
            return (scaled(logits, warm) + gumbel(keys, keys, logits.shape[1])).argmax(-1)

        def fused(logits: Tensor = logits, warm: Tensor = warm, keys: Tensor = keys) -> Tensor:
            return fused_draw.draw(logits, warm, keys, keys)

        def filtered(logits: Tensor = logits, warm: Tensor = warm, keys: Tensor = keys) -> Tensor:
            return fused_draw.draw_filtered(
                logits, warm, keys, keys, keys * 0 + 50, warm * 0.9, warm * 0.01
            )

        equal = float((plain() == fused()).float().mean())
        yield {"rows": rows, "equal": equal, "torch ms": meter.ms(plain),
               "fused ms": meter.ms(fused), "filtered ms": meter.ms(filtered)}  # fmt: skip


def told(report: dict[str, Any], name: str, records: Iterator[Record]) -> None:
    """Run a section, print it as a table and keep it."""
    print(f"\n{name}", flush=True)
    report[name] = list(records)
    table(report[name])


def compiling(small: bool) -> Iterator[Record]:
    """Programs for GPUs of three generations, none of which need be here."""
    from spec_serve.bench.gpu_compile import report

    targets = (90,) if small else (80, 90, 100)
    yield from report(("bf16",) if small else ("bf16", "fp16"), targets)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench gpu", description=__doc__)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    known = [*MODELS, *MIXTURES]
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=known)
    parser.add_argument("--attention", nargs="+", default=["triton", "torch"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=540.0, help="take up no work after that")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU; a rehearsal")
    parser.add_argument("--json", default="", help="file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the sections; 1 if an answer was wrong, 2 if there is no GPU to run them on."""
    args = arguments(argv)
    device, small = pick_device(args.device), args.small
    report: dict[str, Any] = {"torch": torch.__version__, "small": small, "device": str(device)}
    if device.type == "cuda":
        report["device"] = torch.cuda.get_device_name(device)
    elif not small and set(args.sections) != {"compile"}:
        print("bench gpu: torch finds no GPU here; --sections compile needs none")
        return 2
    meter = Meter(device, args.seconds, args.repeat)
    if "compile" in args.sections:
        told(report, "compile", compiling(small))
    if "correct" in args.sections:
        told(report, "correct", correct(device, pick_backend(device, args.attention[0]), small))
    speed = meter.bandwidth(1 << 22 if small else 1 << 32)
    report["bandwidth"] = speed
    print(f"\nmemory: {speed / 1e9:.0f} GB/s", flush=True)
    if "attention" in args.sections:
        told(report, "attention", attention(meter, args.attention, speed, small))
    if "draw" in args.sections:
        told(report, "draw", draws(meter, small))
    if "quantised" in args.sections and not meter.over():
        from spec_serve.bench.gpu_quantised import quantised

        told(report, "quantised", quantised(meter.ms, device, speed, small))
    whole = {"steps", "gaps", "served"} & set(args.sections)
    for name in args.models if whole and not meter.over() else ():
        dtype = torch.float32 if small else torch.bfloat16
        weights = Random(SMALL if small else (MODELS | MIXTURES)[name], device)
        model = load_model(weights, dtype, device)
        if "steps" in whole:
            backend = pick_backend(device, args.attention[0])
            floor = weights.values_read() * dtype.itemsize / speed * 1e3
            told(report, f"steps {name}", steps(meter, model, name, backend, floor, small))
        for section, run in (("gaps", gaps), ("served", served)):
            if section in whole:
                told(report, f"{section} {name}", run(model, name, small, meter.over))
        del model
    report["cut short"] = meter.over()
    write_json(args.json, report)
    judged = (*report.get("correct", ()), *report.get("quantised", ()))
    wrong = [record for record in judged if "NO" in (record["good"], record.get("alone"))]
    return 1 if wrong else 0
