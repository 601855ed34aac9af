"""What a forward costs: milliseconds over nodes and context, for chains and trees.

Runs the target's whole forward (head included) on prepared caches. For a model that runs as
compiled code also the curve of a step, and each kind of matrix, in shares of what memory and
arithmetic give at most (compiled.py). Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch

from spec_serve.bench import compiled
from spec_serve.bench.report import table, write_json
from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import TokenTree, chain
from spec_serve.kernels.cpu.native import ISAS, Pool
from spec_serve.spec.assemble import attention_for
from spec_serve.spec.load import DTYPES, QUANTISATIONS, pick_device
from spec_serve.target.hub import resolve
from spec_serve.target.model import Model, load_model
from spec_serve.target.native import NativeTransformer, load_native, unfit
from spec_serve.target.weights import open_checkpoint

CURVE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64)


def bushy(nodes: int) -> TokenTree:
    """A binary tree: every node has two children."""
    return TokenTree(range(1, nodes + 1), [(i - 1) // 2 for i in range(nodes)], 1)


def forward_ms(
    model: Model, tree: TokenTree, context: int, attention: str, repeat: int
) -> float:
    """Median milliseconds of one forward over `tree` behind `context` cached tokens."""
    n = len(tree)
    pool = KVPool(model.kv_specs, context + n, 1, context + n, model.device)
    pool.assign(0, 0, range(1, context + 1))
    backend = attention_for(model, attention)
    slots = range(context + 1, context + n + 1)
    times: list[float] = []
    for _ in range(repeat + 1):
        begun = perf_counter()
        batch = build_batch([Twig(0, context, tree, slots, 0)], model.device)
        model.forward(batch, pool.layers, backend.plan(batch, pool.table))
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - begun) * 1e3)
    return median(times[1:])


def load(args: argparse.Namespace) -> Model:
    """The model as the engine would run it, or in torch where that is asked for."""
    device = pick_device(args.device)
    dtype = DTYPES.get(args.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    checkpoint = open_checkpoint(resolve(args.target))
    try:
        plain = device.type != "cpu" or args.dtype != "auto" or args.attention != "auto"
        if not plain and not unfit(checkpoint, args.quantize):
            return load_native(checkpoint, args.threads, args.quantize, isa=args.isa)
        return load_model(checkpoint, dtype, device)
    finally:
        checkpoint.close()


def compiled_report(model: NativeTransformer, args: argparse.Namespace) -> dict[str, Any]:
    """Ceilings, curve and operators, printed and returned."""
    alone, together = Pool(1), Pool(model.threads)
    one, found = (compiled.measure_ceilings(pool, model.isa) for pool in (alone, together))
    for _ in range(args.ceilings - 1):
        one = compiled.higher(one, compiled.measure_ceilings(alone, model.isa))
        found = compiled.higher(found, compiled.measure_ceilings(together, model.isa))
    for held in dict.fromkeys((one, found)):
        print(
            f"{held.isa}, {held.threads} threads: memory {held.memory / 1e9:.1f} GB/s, "
            f"integers {held.small / 1e9:.0f} (4 bits) and {held.bytes_ / 1e9:.0f} (8 bits), "
            f"floats {held.floats / 1e9:.0f} GMAC/s"
        )
    held_mb = model.nbytes / 1e6
    print(f"{model.precision}, {held_mb:.0f} MB, activations of {8 * model.planes} bits\n")
    curve = compiled.curve(model, args.curve, args.context[0], found, args.repeat)
    table([_shown(record) for record in curve])
    operators = []
    for n in args.operators:
        print()
        operators += compiled.operators(model, n, found, args.repeat)
        operators.append(compiled.attention(model, n, max(args.context), found, args.repeat))
        table([_shown(record) for record in operators if record["nodes"] == n])
    print()
    return {
        "ceilings": [asdict(one), asdict(found)], "curve": curve, "operators": operators,
        "model": {"precision": model.precision, "bytes": model.nbytes, "planes": model.planes,
                  "threads": model.threads},
    }  # fmt: skip


def _shown(record: dict[str, Any]) -> dict[str, object]:
    return {
        name: f"{value * 100:.0f} %" if value and name in ("memory", "arithmetic") else value
        for name, value in record.items()
    }


def trees(model: Model, args: argparse.Namespace) -> list[dict[str, object]]:
    """Chains and trees over contexts."""
    records = []
    for context in args.context:
        for name, shape in (("chain", lambda n: chain(range(1, n + 1), given=1)), ("tree", bushy)):
            record: dict[str, object] = {"context": context, "shape": name}
            base = 0.0
            for n in args.nodes:
                ms = forward_ms(model, shape(n), context, args.attention, args.repeat)
                base = base or ms
                record[f"n={n}"] = f"{ms:.1f} ({ms / base:.2f})"
            records.append(record)
    return records


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench kernels", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES),
                        help="anything but auto: in torch")  # fmt: skip
    parser.add_argument("--quantize", default="none", choices=QUANTISATIONS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", default="auto", choices=("auto", *ISAS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 512, 1500])
    parser.add_argument("--curve", type=int, nargs="+", default=list(CURVE),
                        help="nodes of the compiled curve")  # fmt: skip
    parser.add_argument("--operators", type=int, nargs="*", default=[1, 8, 64],
                        help="nodes for which the compiled matrices are timed")  # fmt: skip
    parser.add_argument("--ceilings", type=int, default=3, help="measurements of the ceilings")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", default="", help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    args = arguments(argv)
    torch.set_num_threads(max(args.threads, 1))
    model = load(args)
    more: dict[str, Any] = {}
    if isinstance(model, NativeTransformer):
        # Torch's idle threads would spin for the cores that the model wants.
        torch.set_num_threads(1)
        more = compiled_report(model, args)
    records = trees(model, args)
    table(records)
    write_json(
        args.json, {"bench": "kernels", "options": vars(args), "records": records, **more}
    )
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
