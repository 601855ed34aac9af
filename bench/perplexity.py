"""Perplexity of a fixed text: compiled kernels, the same weights in float32, and llama.cpp.

The text is cut into windows as llama-perplexity does it, and each window's second half is scored,
so that figures for the same GGUF file can be compared. In float32 the weights are what the file's
quantisation means, computed by torch: how far the kernels' logits are from that is their error.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from spec_serve.bench.passage import passage
from spec_serve.bench.report import table, write_json
from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.spec.assemble import attention_for
from spec_serve.target.hub import resolve
from spec_serve.target.model import Model, load_model
from spec_serve.target.native import load_native
from spec_serve.target.tokenizer import Tokenizer, load_tokenizer
from spec_serve.target.weights import open_checkpoint

PIECE = 64  # tokens of a window per forward
# The program's line "Final estimate: PPL = 15.1234 +/- 0.56789".
ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids of each window [W][context]; `first`: the place from which on logits are judged."""

    ids: list[list[int]]
    first: int


def windows(tokenizer: Tokenizer, text: str, context: int) -> Windows:
    """Whole windows only; each begins with the BOS token if the model's texts do.

    ValueError for fewer than two, of which llama-perplexity makes nothing either."""
    ids = tokenizer.encode(text)
    count = len(ids) // context
    if count < 2:
        raise ValueError(f"context: the text has {len(ids)} tokens, two windows need {2 * context}")
    begins = ids[: len(ids) - len(tokenizer.encode(text, bos=False))]
    cut = [ids[i * context : (i + 1) * context] for i in range(count)]
    return Windows([begins + window[len(begins) :] for window in cut], context // 2)


def judged(model: Model, held: Windows) -> list[Tensor]:
    """Logits [context - 1 - first, V] of each window at the places whose next token is scored."""
    context = len(held.ids[0])
    pool = KVPool(model.kv_specs, context, 1, context, model.device)
    attention = attention_for(model, "auto")
    made = []
    for ids in held.ids:
        parts = []
        for at in range(0, context, PIECE):
            piece = ids[at : at + PIECE]
            slots = range(at + 1, at + len(piece) + 1)
            begin = min(max(held.first - at, 0), len(piece))
            twig = Twig(0, at, chain(piece, given=len(piece)), slots, begin)
            batch = build_batch([twig], model.device)
            out = model.forward(batch, pool.layers, attention.plan(batch, pool.table))
            parts.append(out.logits.float())
            pool.assign(0, at, list(slots))
        made.append(torch.cat(parts)[:-1])
    return made


def perplexity(logits: Sequence[Tensor], held: Windows) -> float:
    """exp of the mean negative log-probability."""
    total, count = 0.0, 0
    for rows, ids in zip(logits, held.ids, strict=True):
        following = torch.tensor(ids[held.first + 1 :])
        total -= torch.log_softmax(rows.double(), 1).gather(1, following[:, None]).sum().item()
        count += len(following)
    return math.exp(total / count)


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm, each row less its mean, which changes no choice."""
    off = size = 0.0
    for a, b in zip(found, wanted, strict=True):
        centred = b.double() - b.double().mean(1, keepdim=True)
        off += (a.double() - a.double().mean(1, keepdim=True) - centred).square().sum().item()
        size += centred.square().sum().item()
    return math.sqrt(off / size)


def llama(program: Path, model: Path, text: str, context: int, threads: int) -> float:
    """What llama-perplexity says. RuntimeError with its last words if it says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(text)
        done = subprocess.run(
            [program, "-m", model, "-f", file, "-c", str(context), "-b", str(context),
             "-t", str(threads), "--no-warmup"],
            capture_output=True, text=True, check=False, errors="replace",
        )  # fmt: skip
    said = ESTIMATE.search(done.stdout + done.stderr)
    if said is None:
        raise RuntimeError(f"{program}: {(done.stderr or done.stdout).strip()[-500:]}")
    return float(said[1])


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """One record per way of computing the same file."""
    path = resolve(args.target)
    text = Path(args.text).read_text() if args.text else passage()
    held = windows(load_tokenizer(path), text, args.context)
    records: list[dict[str, object]] = []
    checkpoint = open_checkpoint(path)
    try:
        exact: list[Tensor] = []
        if not args.no_float32:
            exact = judged(load_model(checkpoint, torch.float32, "cpu"), held)
            records.append({"computed by": "torch, float32", "perplexity": perplexity(exact, held),
                            "logits off": 0.0})  # fmt: skip
        torch.set_num_threads(1)
        for bits, kv in product(args.activations, args.kv_dtype):
            model = load_native(
                checkpoint, args.threads, isa=args.isa, activations=bits, kv=getattr(torch, kv)
            )
            found = judged(model, held)
            records.append({"computed by": f"kernels, {model.isa}, {bits} bits, K/V {kv}",
                            "perplexity": perplexity(found, held),
                            "logits off": error(found, exact) if exact else None})  # fmt: skip
    finally:
        checkpoint.close()
    if args.llama:
        said = llama(Path(args.llama), path, text, args.context, args.threads)
        records.append({"computed by": "llama.cpp", "perplexity": said, "logits off": None})
        for record in records:
            record["against llama.cpp"] = float(str(record["perplexity"])) / said - 1
    return records


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench perplexity", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="a quantised model")
    parser.add_argument("--text", default="", help="a file; default: one that is built in")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--activations", type=int, nargs="*", choices=(8, 16), default=[16, 8],
                        help="bits of activations")  # fmt: skip
    parser.add_argument("--kv-dtype", nargs="+", choices=("float16", "int8"), default=["float16"])
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-float32", action="store_true", help="leave the reference out")
    parser.add_argument("--llama", default="", metavar="PROGRAM", help="path of llama-perplexity")
    parser.add_argument("--json", default="", help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    args = arguments(argv)
    with torch.inference_mode():
        records = measure(args)
    table([
        {name: f"{value * 100:.2f} %" if isinstance(value, float) and name != "perplexity" else
         f"{value:.4f}" if isinstance(value, float) else value for name, value in record.items()}
        for record in records
    ])  # fmt: skip
    write_json(args.json, {"bench": "perplexity", "options": vars(args), "records": records})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
