"""What a forward costs: milliseconds over nodes and context, for chains and trees.

Runs the target's whole forward (head included) on prepared caches. Prints a table and writes JSON;
the column of one node is the base of the ratios.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch

from spec_serve.bench.report import table, write_json
from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import TokenTree, chain
from spec_serve.kernels.base import pick_backend
from spec_serve.spec.load import DTYPES, pick_device
from spec_serve.target.hub import resolve
from spec_serve.target.model import Transformer, load_model
from spec_serve.target.weights import open_checkpoint


def bushy(nodes: int) -> TokenTree:
    """A binary tree: every node has two children."""
    return TokenTree(range(1, nodes + 1), [(i - 1) // 2 for i in range(nodes)], 1)


def forward_ms(
    model: Transformer, tree: TokenTree, context: int, attention: str, repeat: int
) -> float:
    """Median milliseconds of one forward over `tree` behind `context` cached tokens."""
    n = len(tree)
    pool = KVPool(model.kv_specs, context + n, 1, context + n, model.device)
    pool.assign(0, 0, range(1, context + 1))
    backend = pick_backend(model.device, attention)
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


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    parser = argparse.ArgumentParser(prog="spec-serve bench kernels", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 512, 1500])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", default="", help="write the figures to this file")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    dtype = DTYPES.get(args.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    checkpoint = open_checkpoint(resolve(args.target))
    model = load_model(checkpoint, dtype, device)
    checkpoint.close()
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
    table(records)
    write_json(args.json, {"bench": "kernels", "options": vars(args), "records": records})
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
