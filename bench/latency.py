"""Latency per prompt category: speculation on against off, alternating, in one run.

Each prompt is answered twice by the same engine, once with speculation and once without, under
cache salts of their own, so that neither run can look at the other's text. Prints a table per
category and writes JSON: time to first token, time between tokens, tokens per second and per step,
acceptance by source and depth, and where the time went.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median
from typing import Any

from spec_serve.bench.prompts import Prompt, load
from spec_serve.bench.report import table, write_json
from spec_serve.bench.running import Run, run
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.engine import Engine
from spec_serve.spec.load import build_engine
from spec_serve.spec.request import Sampling, Speculation
from spec_serve.target.tokenizer import Tokenizer

Pair = tuple[Run, Run]  # off, on


def encode(tokenizer: Tokenizer, prompt: Prompt, answers: list[str]) -> list[int]:
    """Ids of the conversation up to the turn after `answers`."""
    if prompt.raw:
        return tokenizer.encode(prompt.turns[0])
    messages: list[dict[str, Any]] = []
    for turn, answer in zip(prompt.turns, [*answers, None], strict=False):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return tokenizer.render_chat(messages)


def compare(
    engine: Engine, tokenizer: Tokenizer, prompts: list[Prompt], args: argparse.Namespace
) -> dict[str, list[Pair]]:
    """Answer every turn of every prompt off and on; the order changes from prompt to prompt."""
    found: dict[str, list[Pair]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        answers: list[str] = []
        for turn in range(min(len(prompt.turns), args.turns)):
            ids = encode(tokenizer, prompt, answers)
            room = engine.info.max_context - len(ids)
            if room < 8:
                break
            runs: dict[str, Run] = {}
            for mode in ("off", args.speculation) if number % 2 else (args.speculation, "off"):
                runs[mode] = run(
                    engine,
                    ids,
                    min(args.max_tokens, room),
                    speculation=Speculation(mode=mode),
                    sampling=Sampling(temperature=args.temperature, seed=number),
                    eos=tokenizer.eos_ids,
                    salt=f"{mode}{number}",
                )
            off, on = runs["off"], runs[args.speculation]
            found[prompt.category].append((off, on))
            answers.append(tokenizer.decode(off.tokens))
            print(
                f"{number + 1}/{len(prompts)} {prompt.category} turn {turn + 1}: "
                f"off {off.tokens_per_s:.1f} tok/s, on {on.tokens_per_s:.1f} tok/s, "
                f"{len(on.tokens) / max(len(on.steps), 1):.2f} tokens/step, "
                f"{'same tokens' if on.tokens == off.tokens else 'TOKENS DIFFER'}",
                flush=True,
            )
    return found


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def gaps(run_: Run) -> list[float]:
    """Milliseconds between the arrivals of neighbouring tokens (0 inside one step)."""
    times = run_.arrivals
    return [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]


def summary(category: str, pairs: list[Pair]) -> dict[str, Any]:
    """One line of the table."""
    timed = [(off, on) for off, on in pairs if len(off.tokens) > 4 and len(on.tokens) > 4]
    offs, ons = [off for off, _ in pairs], [on for _, on in pairs]
    steps = [step for on in ons for step in on.steps]
    between_on = [gap for on in ons for gap in gaps(on)]
    between_off = [gap for off in offs for gap in gaps(off)]
    speed_off = median([off.tokens_per_s for off, _ in timed]) if timed else 0.0
    speed_on = median([on.tokens_per_s for _, on in timed]) if timed else 0.0
    ratios = [on.tokens_per_s / off.tokens_per_s for off, on in timed]
    drafted = sum(on.drafted for on in ons)
    return {
        "category": category,
        "answers": len(pairs),
        "same": sum(off.tokens == on.tokens for off, on in pairs),
        "off tok/s": speed_off,
        "on tok/s": speed_on,
        "on/off": median(ratios) if ratios else 0.0,
        "total on/off": sum(off.decode_s for off, _ in timed)
        / max(sum(on.decode_s for _, on in timed), 1e-9),
        "tok/step": sum(len(on.tokens) for on in ons) / max(len(steps), 1),
        "accept": sum(on.accepted for on in ons) / drafted if drafted else 0.0,
        "ttft off ms": median([off.ttft_ms for off in offs]),
        "ttft on ms": median([on.ttft_ms for on in ons]),
        "itl p50": percentile(between_on, 0.5),
        "itl p99": percentile(between_on, 0.99),
        "off p50": percentile(between_off, 0.5),
        "off p99": percentile(between_off, 0.99),
        "draft ms": sum(s.draft_us for s in steps) / 1e3 / max(len(steps), 1),
        "verify ms": sum(s.verify_us for s in steps) / 1e3 / max(len(steps), 1),
        "host us": median([s.host_us for s in steps]) if steps else 0.0,
    }


def by_source(pairs: list[Pair]) -> list[dict[str, Any]]:
    """Drafted and accepted nodes by source, over all answers with speculation."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for _, on in pairs:
        for step in on.steps:
            for name, (drafted, accepted) in step.sources.items():
                counts[name][0] += drafted
                counts[name][1] += accepted
    return [
        {"source": name, "drafted": drafted, "accepted": accepted, "rate": accepted / drafted}
        for name, (drafted, accepted) in sorted(counts.items())
    ]


def by_depth(engine: Engine) -> list[dict[str, Any]]:
    """Acceptance given that the parent was accepted, by source and depth, as the engine learned."""
    return [
        {"source": kind, "depth": depth, "tried": int(tried), "rate": right / tried}
        for kind, depths in engine.builder.calibration.table().items()
        if ":" not in kind
        for depth, (right, tried) in depths.items()
    ]


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench latency", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speculation", choices=("auto", "max"), default="auto")
    parser.add_argument("--max-nodes", type=int, default=EngineOptions("").max_nodes)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=1, help="turns of each conversation")
    parser.add_argument(
        "--prompts", nargs="*", default=[], help="JSON-lines files; default built in"
    )
    parser.add_argument("--per-category", type=int, default=0, help="prompts of each; 0 = all")
    parser.add_argument("--json", default="", help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    args = arguments(argv)
    options = EngineOptions(
        target=args.target, draft=args.draft, dtype=args.dtype, device=args.device,
        max_nodes=args.max_nodes, max_rows=1, kv_fraction=0.2,
    )  # fmt: skip
    engine, tokenizer = build_engine(options)
    cost = engine.builder.cost
    curve = [{"nodes": n, "ms": cost.at(n)} for n in (1, 2, 4, 8, 16, 32, 64)]
    print("a step over n nodes:", ", ".join(f"{c['nodes']}: {c['ms']:.1f} ms" for c in curve))
    found = compare(engine, tokenizer, load(args.prompts, args.per_category), args)
    records = [summary(category, pairs) for category, pairs in found.items()]
    everything = [pair for pairs in found.values() for pair in pairs]
    records.append(summary("ALL", everything))
    print()
    table(records)
    print()
    table(by_source(everything))
    write_json(
        args.json,
        {
            "bench": "latency",
            "options": vars(args),
            "cost": curve,
            "records": records,
            "sources": by_source(everything),
            "depths": by_depth(engine),
        },
    )
    return 0 if all(off.tokens == on.tokens for off, on in everything) else 1


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
