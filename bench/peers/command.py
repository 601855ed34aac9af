"""The command line of `bench peers`: prompts, engines, the comparison, and where results go.

Knows flags and files; what is measured and how it is shown is said elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spec_serve.bench.latency import encode
from spec_serve.bench.peers import engines, show
from spec_serve.bench.peers.compare import Question, compare
from spec_serve.bench.peers.machine import cores, machine
from spec_serve.bench.prompts import load
from spec_serve.target.hub import resolve
from spec_serve.target.tokenizer import Tokenizer, load_tokenizer

CATEGORIES = ("edit", "code", "chat")
SAID = "The same file and prompts through spec-serve and other engines, alternating."


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench peers", description=SAID)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="a GGUF file")
    parser.add_argument("--draft", default="", help="a small model for peers' modes with one")
    parser.add_argument("--own-draft", default="lookup", help="spec-serve's own --draft")
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME[/MODE]")
    parser.add_argument("--venv", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--install", metavar="NAME", help="make an engine's environment, and end")
    parser.add_argument("--prompts", nargs="*", default=[], help="JSON lines; default built in")
    parser.add_argument("--categories", nargs="*", default=None,
                        help="of the built-in prompts: edit code chat; nothing = all")  # fmt: skip
    parser.add_argument("--per-category", type=int, default=0, help="prompts of each; 0 = all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0 = as many as there are cores")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for an answer")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--plot", default="", help="write an SVG to this file")
    parser.add_argument("--markdown", default="", help="write the table to this file")
    parser.add_argument("--from-json", nargs="+", default=[], help="show these instead of running")
    parser.add_argument("--update-readme", default="", metavar="README",
                        help="put the table between the markers of this file")  # fmt: skip
    return parser.parse_args(argv)


def questions(
    tokenizer: Tokenizer, paths: Sequence[str], wanted: Sequence[str] | None, per_category: int,
    room: int,
) -> list[Question]:  # fmt: skip
    """First turns as token ids; those longer than `room` are left out. ValueError if none is
    left."""
    if wanted is None:
        wanted = () if paths else CATEGORIES
    made: list[Question] = []
    counts: dict[str, int] = {}
    for prompt in load(paths, 0):
        if wanted and prompt.category not in wanted:
            continue
        ids = encode(tokenizer, prompt, [])
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if len(ids) <= room and (not per_category or counts[prompt.category] <= per_category):
            made.append(Question(prompt.category, ids))
    if not made:
        raise ValueError(f"prompts: none of these categories that has at most {room} tokens")
    return made


def compared(args: argparse.Namespace, venvs: dict[str, str]) -> dict[str, Any]:
    """Run the comparison. Raises ValueError for what the user got wrong."""
    for name in ("max_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name.replace('_', '-')}: must be at least 1")
    chosen, missing = engines.choose(args.engines, args.draft, venvs)
    for name, reason in missing.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    target = resolve(args.target)
    tokenizer = load_tokenizer(target)
    asked = questions(
        tokenizer, args.prompts, args.categories, args.per_category, args.context - args.max_tokens
    )
    options = {
        "model": str(target), "draft": str(resolve(args.draft)) if args.draft else "",
        "own_draft": args.own_draft, "threads": args.threads or cores(), "context": args.context,
        "eos": sorted(tokenizer.eos_ids),
    }  # fmt: skip
    before = machine()
    made = datetime.now(UTC).isoformat(timespec="seconds")
    found = compare(
        chosen, asked, options,
        max_tokens=args.max_tokens, repeats=args.repeats, timeout_s=args.timeout,
    )  # fmt: skip
    return {
        "bench": "peers", "made": made, "machine": before, "target": _short(args.target),
        "draft": _short(args.draft), "own_draft": args.own_draft,
        "options": {"max_tokens": args.max_tokens, "repeats": args.repeats,
                    "threads": options["threads"], "context": args.context},
        **found,
        "skipped": {**missing, **{name: _bare(why) for name, why in found["skipped"].items()}},
    }  # fmt: skip


def _short(name: str) -> str:
    """A model's name without the folders of this machine."""
    return Path(name).name if name and Path(name).expanduser().exists() else name


def _bare(text: str) -> str:
    """An error without the folders of this machine."""
    return re.sub(r"/(?:[\w.+~-]+/)+", "", text)


def main(argv: Sequence[str]) -> int:
    """Run what the command line says; returns the exit code."""
    args = arguments(argv)
    try:
        venvs = dict(pair.split("=", 1) for pair in args.venv)
    except ValueError:
        print("spec-serve: error: venv: NAME=FOLDER was expected", file=sys.stderr)
        return 2
    try:
        if args.install:
            print(f"installed in {engines.install(args.install, venvs)}")
            return 0
        if args.from_json:
            reports = [json.loads(Path(path).read_text()) for path in args.from_json]
        else:
            reports = [compared(args, venvs)]
        _write(args, reports)
    except (OSError, ValueError) as error:
        print(f"spec-serve: error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"spec-serve: error: install: {error}", file=sys.stderr)
        return 1
    return 0 if all(report["runs"] for report in reports) else 1


def _write(args: argparse.Namespace, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        print(f"\n{show.described(report)}")
        header, *body = show.table(report)
        widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
        for line in (header, *body):
            first, *rest = (cell.rjust(w) for cell, w in zip(line, widths, strict=True))
            print("  ".join([first.strip().ljust(widths[0]), *rest]))
        for name, reason in report["skipped"].items():
            print(f"left out: {name}: {reason}")
    text = show.markdown(reports)
    if args.json and not args.from_json:
        Path(args.json).write_text(json.dumps(reports[0], indent=1) + "\n")
    if args.plot:
        Path(args.plot).write_text(show.plot(reports[0]), encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(text + "\n", encoding="utf-8")
    if args.update_readme:
        show.update(Path(args.update_readme), text)
