"""Multi-turn chats: time to first token of a second turn, cached against cold.

The first turn's history has a chosen length. The second turn is served once under the salt of the
first (its prefix is cached) and once under a fresh one (cold). A hit must change neither the text
nor how many guesses are accepted; sources that look at other requests are left out, since what
they have seen differs on purpose. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from spec_serve.bench.prompts import ARTICLE
from spec_serve.bench.report import table, write_json
from spec_serve.bench.running import Run, run
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.engine import Engine
from spec_serve.spec.load import build_engine
from spec_serve.spec.request import Speculation
from spec_serve.target.tokenizer import Tokenizer

FIRST = "Which facts about the harbour does the text name? Answer in one sentence."
SECOND = "And what stands at its entrance? Quote the sentence."


def conversation(tokenizer: Tokenizer, history: int) -> tuple[list[dict[str, Any]], list[int]]:
    """A first turn whose rendered prompt has at least `history` tokens."""
    text = ARTICLE
    while True:
        messages = [{"role": "user", "content": f"{text}\n\n{FIRST}"}]
        ids = tokenizer.render_chat(messages)
        if len(ids) >= history:
            return messages, ids
        text += f"\n\nNote {len(text)}. {ARTICLE}"


def turns(
    engine: Engine, tokenizer: Tokenizer, history: int, number: int, max_tokens: int
) -> tuple[Run, Run, int]:
    """(cold, cached) runs of the second turn, and the tokens of its prompt."""
    messages, first = conversation(tokenizer, history)
    sources = frozenset(engine.info.sources) - {"radix", "shared"}
    speculation = Speculation(sources=sources)

    def serve(ids: Sequence[int], salt: str) -> Run:
        return run(
            engine, ids, max_tokens, speculation=speculation, eos=tokenizer.eos_ids, salt=salt
        )

    answer = serve(first, f"warm{number}")
    messages.append({"role": "assistant", "content": tokenizer.decode(answer.tokens)})
    messages.append({"role": "user", "content": SECOND})
    second = tokenizer.render_chat(messages)
    if number % 2:
        cold = serve(second, f"cold{number}")
        cached = serve(second, f"warm{number}")
    else:
        cached = serve(second, f"warm{number}")
        cold = serve(second, f"cold{number}")
    return cold, cached, len(second)


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    parser = argparse.ArgumentParser(prog="spec-serve bench prefix", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--history", type=int, nargs="+", default=[500, 1500])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--json", default="", help="write the figures to this file")
    args = parser.parse_args(argv)
    engine, tokenizer = build_engine(
        EngineOptions(target=args.target, draft=args.draft, max_rows=1, kv_fraction=0.2)
    )
    records = []
    same = True
    for history in args.history:
        runs = [
            turns(engine, tokenizer, history, number, args.max_tokens)
            for number in range(args.repeat)
        ]
        same = same and all(cold.tokens == cached.tokens for cold, cached, _ in runs)
        records.append(
            {
                "history": history,
                "prompt": runs[0][2],
                "hit rate": median(hit.usage.cached_tokens / n for _, hit, n in runs),
                "cold ttft ms": median(cold.ttft_ms for cold, _, _ in runs),
                "cached ttft ms": median(cached.ttft_ms for _, cached, _ in runs),
                "cached/cold": median(cached.ttft_ms / cold.ttft_ms for cold, cached, _ in runs),
                "same text": all(cold.tokens == cached.tokens for cold, cached, _ in runs),
                "accepted cold": sum(cold.accepted for cold, _, _ in runs),
                "accepted cached": sum(cached.accepted for _, cached, _ in runs),
            }
        )
    table(records)
    write_json(args.json, {"bench": "prefix", "options": vars(args), "records": records})
    return 0 if same else 1


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
