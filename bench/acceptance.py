"""Acceptance: tokens per step by category, depth, source, size of tree and temperature.

Answers prompts with speculation under several node limits ("auto" = what the budget finds best)
and temperatures, and counts what was accepted; no clock plays a part, so a busy machine changes
nothing but what "auto" decides. Prints tables and writes JSON and a page of plots, beside figures
others have published.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from spec_serve.bench.bars import bars
from spec_serve.bench.latency import encode
from spec_serve.bench.plots import Point, chart
from spec_serve.bench.prompts import Prompt, load
from spec_serve.bench.report import cell, table, write_json
from spec_serve.bench.serve_html import STYLE
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.engine import Engine
from spec_serve.spec.load import build_engine
from spec_serve.spec.request import Request, Sampling, Speculation, StepRecord, Stopping
from spec_serve.target.tokenizer import Tokenizer

PUBLISHED = (
    # method, target and setting, tokens per step, source
    ("EAGLE-1", "Vicuna-7B, Spec-Bench", 3.57, "Spec-Bench leaderboard"),
    ("EAGLE-2", "Vicuna-7B, Spec-Bench", 4.36, "Spec-Bench leaderboard"),
    ("Medusa", "Vicuna-7B, Spec-Bench", 2.32, "Spec-Bench leaderboard"),
    ("small draft model", "Vicuna-7B, Spec-Bench", 2.28, "Spec-Bench leaderboard"),
    ("prompt lookup", "Vicuna-7B, Spec-Bench", 1.73, "Spec-Bench leaderboard"),
    ("EAGLE-3", "Llama-3.1-8B, MT-Bench, SGLang", 5.39, "sglang #4247"),
    ("EAGLE-3, chain", "Qwen3-8B", 1.99, "AngelSlim docs"),
    ("EAGLE-3, block of 7", "Qwen3-8B, MT-Bench, T = 1", 2.66, "DSpark paper"),
    ("DFlash, block of 7", "Qwen3-8B, MT-Bench, T = 1", 3.11, "DSpark paper"),
    ("DSpark, block of 7", "Qwen3-8B, MT-Bench, T = 1", 3.72, "DSpark paper"),
    ("JetSpec, tree of 128", "Qwen3-8B, MT-Bench", 4.88, "JetSpec README"),
)


@dataclass(slots=True)
class Tally:
    """Steps of answers that were alike in what was asked.

    reached[d], tried[d]: trees at least d deep, and those of them accepted down to depth d.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tried: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sources: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def add(self, step: StepRecord) -> None:
        """Count one step that yielded its bonus."""
        self.steps += 1
        self.tokens += step.accepted + 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        for depth in range(1, deepest(step.tree_parents) + 1):
            self.tried[depth] += 1
            self.reached[depth] += step.accepted >= depth
        for name, (drafted, accepted) in step.sources.items():
            self.sources[name][0] += drafted
            self.sources[name][1] += accepted

    @property
    def per_step(self) -> float:
        """Tokens a step yields, the target's own included."""
        return self.tokens / self.steps if self.steps else 0.0

    def depths(self) -> list[Point]:
        """(depth, share of trees that deep accepted down to it)."""
        return [(d, self.reached[d] / self.tried[d]) for d in sorted(self.tried)]


def deepest(parents: Sequence[int]) -> int:
    """Depth of a tree given its nodes' parents, -1 = the newest token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def answer(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Prompt], nodes: str,
    temperature: float, most: int,
) -> dict[str, Tally]:  # fmt: skip
    """Tallies by category. nodes: a number of guesses a step always has, or "auto"."""
    forced = None if nodes == "auto" else int(nodes)
    speculation = Speculation("auto") if forced is None else Speculation("max", forced)
    stopping = Stopping(max_tokens=most, eos=tokenizer.eos_ids)
    asked: list[tuple[str, Request]] = []
    for number, prompt in enumerate(prompts):
        ids = encode(tokenizer, prompt, [])
        if len(ids) + 8 > engine.info.max_context:
            continue
        sampling = Sampling(temperature=temperature, seed=number)
        name = f"{nodes}/{temperature}/{number}"
        # A salt of its own: nothing may be copied from another setting's answer.
        asked.append(
            (prompt.category, Request(name, ids, sampling, stopping, speculation, salt=name))
        )
    done = engine.generate([request for _, request in asked])
    found: dict[str, Tally] = defaultdict(Tally)
    for (category, _), completion in zip(asked, done, strict=True):
        # The first token comes out of the prompt's own step, the last step may be cut short.
        for step in completion.steps[1:-1]:
            found[category].add(step)
            found["ALL"].add(step)
    return found


def warmth(found: Mapping[tuple[str, float], Mapping[str, Tally]]) -> list[dict[str, Any]]:
    """Tokens per step of each temperature against T = 0 with as many nodes, by category."""
    rows: list[dict[str, Any]] = []
    for (nodes, temperature), by in found.items():
        cold = found.get((nodes, 0.0))
        if not temperature or cold is None:
            continue
        rows += [
            {"nodes": nodes, "T": temperature, "category": category,
             "of T = 0": tally.per_step / cold[category].per_step}
            for category, tally in sorted(by.items(), key=lambda item: item[0] == "ALL")
            if category in cold and cold[category].steps
        ]  # fmt: skip
    return rows


def beside(
    options: Mapping[str, Any], found: Mapping[tuple[str, float], Mapping[str, Tally]]
) -> list[dict[str, Any]]:
    """Our figures and those others have published, the largest first; targets differ."""
    ours = [
        {"method": f"spec-serve, {options['draft']}",
         "setting": f"{options['target']}, {nodes} nodes, T = {t:g}",
         "tok/step": by["ALL"].per_step, "source": "this run"}
        for (nodes, t), by in found.items() if "ALL" in by
    ]  # fmt: skip
    theirs = [
        {"method": m, "setting": s, "tok/step": value, "source": where}
        for m, s, value, where in PUBLISHED
    ]
    return sorted([*ours, *theirs], key=lambda row: -row["tok/step"])


def page(
    options: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    found: Mapping[tuple[str, float], Mapping[str, Tally]],
) -> str:
    """The whole file of plots."""
    warm = warmth(found)
    said = escape(", ".join(f"{key} = {value}" for key, value in options.items()))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>spec-serve bench acceptance</title><style>{STYLE}</style></head>"
        f"<body><h1>Acceptance</h1>\n<p>{said}</p>\n{_table(records)}\n"
        f'<div class="plots">{drawn(found)}</div>\n'
        + (f"<h2>Temperature</h2>\n{_table(warm)}\n" if warm else "")
        + f"<h2>Beside published figures</h2>\n{_table(beside(options, found))}\n"
        "</body></html>\n"
    )


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in records[0]) if records else ""
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell(value))}</td>' for value in record.values())}</tr>"
        for record in records
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def drawn(found: Mapping[tuple[str, float], Mapping[str, Tally]]) -> str:
    """Plots: by category, source and depth for every setting, by size for every temperature."""
    depths = {f"{n}, T {t:g}": by["ALL"].depths() for (n, t), by in found.items() if "ALL" in by}
    sizes: dict[str, list[Point]] = defaultdict(list)
    for (nodes, temperature), by in found.items():
        if nodes != "auto" and "ALL" in by:
            sizes[f"T {temperature:g}"].append((int(nodes), by["ALL"].per_step))
    named = {f"{n}, T {t:g}": by for (n, t), by in found.items()}
    categories = {
        name: {category: tally.per_step for category, tally in sorted(by.items())}
        for name, by in named.items()
    }
    sources = {
        name: {
            source: accepted / by["ALL"].steps
            for source, (drafted, accepted) in sorted(by["ALL"].sources.items())
            if drafted
        }
        for name, by in named.items()
        if by.get("ALL", Tally()).steps
    }
    plots = [
        bars("Tokens per step by category", categories),
        bars("Accepted guesses a step by source", sources),
    ]
    plots += [chart("Accepted by depth", depths, "depth", "share of trees")]
    if any(len(points) > 1 for points in sizes.values()):
        plots.append(chart("Size of tree", sizes, "guesses a step", "tokens per step"))
    return "\n".join(plots)


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench acceptance", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--nodes", nargs="+", default=["auto", "16"], help='guesses, or "auto"')
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--shape", default="5,4", help="DEPTH,WIDTH a draft grows when forced")
    parser.add_argument("--rows", type=int, default=4, help="answers at once")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", nargs="*", default=[], help="JSON lines; default built in")
    parser.add_argument("--per-category", type=int, default=0, help="prompts of each; 0 = all")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--html", default="", help="write a page of plots to this file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    args = arguments(argv)
    limits = [int(nodes) for nodes in args.nodes if nodes != "auto"]
    options = EngineOptions(
        target=args.target, draft=args.draft, dtype=args.dtype, device=args.device,
        max_rows=args.rows, max_nodes=max([32, *limits]), kv_fraction=0.2,
    )  # fmt: skip
    engine, tokenizer = build_engine(options)
    prompts = load(args.prompts, args.per_category)
    depth, width = (int(part) for part in args.shape.split(","))
    found: dict[tuple[str, float], dict[str, Tally]] = {}
    records: list[dict[str, Any]] = []
    # Without a shape of its own first: what is forced stays forced.
    for nodes in sorted(args.nodes, key=lambda nodes: nodes != "auto"):
        if nodes != "auto":
            engine.builder.grow_always(depth, width)
        for temperature in args.temperatures:
            tallies = answer(engine, tokenizer, prompts, nodes, temperature, args.max_tokens)
            found[nodes, temperature] = tallies
            records += [
                {
                    "nodes": nodes, "T": temperature, "category": category, "steps": tally.steps,
                    "tok/step": tally.per_step,
                    "guesses": tally.drafted / max(tally.steps, 1),
                    "accept": tally.accepted / max(tally.drafted, 1),
                }
                for category, tally in sorted(tallies.items(), key=lambda item: item[0] == "ALL")
            ]  # fmt: skip
    table(records)
    sources = [
        {"nodes": nodes, "T": t, "source": name, "guesses": drafted, "accept": accepted / drafted}
        for (nodes, t), by in found.items()
        for name, (drafted, accepted) in sorted(by["ALL"].sources.items())
        if drafted
    ]
    print()
    table(sources)
    if warm := warmth(found):
        print()
        table(warm)
    depths = {f"{n}/{t}": by["ALL"].depths() for (n, t), by in found.items()}
    report = {"bench": "acceptance", "options": vars(args), "head": engine.info.draft_told}
    write_json(
        args.json,
        {**report, "records": records, "sources": sources, "depths": depths, "warmth": warm},
    )
    if args.html:
        Path(args.html).write_text(page(vars(args), records, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
