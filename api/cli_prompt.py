"""From flags of a one-shot command to a request: prompt, sampling, stops; and steps as JSON.

Greedy unless a temperature is given. Knows a tokenizer by its methods and no engine; what a model
recommends in its generation_config is a server's default, not this command's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_serve.api.messages import Generate, generate
from spec_serve.api.settings import SettingError

if TYPE_CHECKING:
    from spec_serve.spec.completion import Completion
    from spec_serve.spec.request import StepRecord
    from spec_serve.target.tokenizer import Tokenizer


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Flags for what is generated and when it ends."""
    section = parser.add_argument_group("generation")
    default = "what the context leaves" if max_tokens is None else max_tokens
    section.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"tokens at most (default: {default})",
    )  # fmt: skip
    section.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, which is greedy"
    )
    section.add_argument("--top-p", type=float, default=1.0, metavar="P")
    section.add_argument("--top-k", type=int, default=0, metavar="K", help="0 = off")
    section.add_argument("--min-p", type=float, default=0.0, metavar="P")
    section.add_argument("--seed", type=int, metavar="N", help="default: a random one")
    section.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    section.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    section.add_argument("--ignore-eos", action="store_true", help="go on after the model's end")


def add_constraint(parser: argparse.ArgumentParser) -> None:
    """Flags for what the text has to look like, of which one may be given."""
    section = parser.add_argument_group("structured output (one of)")
    one = section.add_mutually_exclusive_group()
    one.add_argument("--regex", metavar="PATTERN", help="the whole text matches it")
    one.add_argument("--json-schema", metavar="FILE", help="JSON that is valid under this schema")
    one.add_argument("--json-object", action="store_true", help="any JSON object")
    one.add_argument(
        "--choices", nargs="+", metavar="TEXT", help="one of these texts, nothing else"
    )
    one.add_argument("--grammar", metavar="NAME", help="a grammar that comes along, as sql_select")
    one.add_argument("--lark", metavar="FILE", help="a grammar in llguidance's Lark")
    section.add_argument(
        "--lenient", action="store_true",
        help="with --json-schema: ignore, and name, keywords that can't be enforced",
    )  # fmt: skip


def read_constraint(given: argparse.Namespace) -> dict[str, Any] | None:
    """The constraint that the flags name, as a `Generate` has it. SettingError for a bad file."""
    if given.lenient and given.json_schema is None:
        raise SettingError("lenient: only with --json-schema")
    if given.regex is not None:
        return {"kind": "regex", "source": given.regex}
    if given.json_schema is not None:
        source = read_text(given.json_schema, "json-schema")
        return {"kind": "json_schema", "source": source, "strict": not given.lenient}
    if given.json_object:
        return {"kind": "json_object"}
    if given.choices is not None:
        return {"kind": "choices", "source": json.dumps(given.choices)}
    if given.grammar is not None:
        return {"kind": "name", "source": given.grammar}
    if given.lark is not None:
        return {"kind": "lark", "source": read_text(given.lark, "lark")}
    return None


def read_messages(path: str) -> list[dict[str, Any]]:
    """A JSON list of {role, content} from a file, "-" = standard input. SettingError if it isn't
    one."""
    text = read_text(path, "messages-file")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"messages-file: {path} is not JSON: {error}") from error
    if not isinstance(held, list) or not held:
        raise SettingError(f"messages-file: {path} must hold a list of {{role, content}}")
    return held


def read_text(path: str, flag: str) -> str:
    """The text of a file, "-" = standard input. SettingError names the flag."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{flag}: {path}: {error}") from error


def read_prompt(given: argparse.Namespace) -> dict[str, Any]:
    """The prompt the flags name, as a field of a `Generate`. SettingError for a bad file."""
    if given.messages_file is not None:
        return {"messages": read_messages(given.messages_file)}
    if given.chat is not None:
        return {"messages": [{"role": "user", "content": given.chat}]}
    if given.prompt is not None:
        return {"prompt": given.prompt}
    return {"prompt": read_text(given.prompt_file, "prompt-file")}


def make_wire(prompt: dict[str, Any], given: argparse.Namespace, mode: str) -> Generate:
    """The request these flags ask for, bounds checked as for any client. mode: of speculation.

    Raises BadMessage (a ValueError) naming the field."""
    sampling = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "min_p": given.min_p,
        "repetition_penalty": given.repetition_penalty,
        "seed": given.seed,
    }
    return generate(
        {
            "type": "generate",
            "gen": "cli",
            **prompt,
            "sampling": sampling,
            "max_tokens": given.max_tokens,
            "stop": given.stop,
            "ignore_eos": given.ignore_eos,
            "logprobs": getattr(given, "logprobs", None),
            "speculation": {"mode": mode},
        }
    )


def step_json(step: StepRecord) -> dict[str, Any]:
    """One step as the JSON output shows it. source: those that guessed, most accepted first,
    joined by "+"; "none" if nothing was guessed."""
    guessed = [(accepted, drafted, s) for s, (drafted, accepted) in step.sources.items() if drafted]
    guessed.sort(key=lambda item: (-item[0], -item[1], item[2]))
    return {
        "drafted": step.drafted,
        "accepted": step.accepted,
        "source": "+".join(name for _, _, name in guessed) or "none",
        "draft_us": step.draft_us,
        "verify_us": step.verify_us,
        "host_us": step.host_us,
    }


def completion_json(done: Completion, text: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything about a finished choice, as `generate --json` prints it. Times: ms, us."""
    from spec_serve.api.generation import FLOOR

    usage, times = done.usage, done.timings
    held: dict[str, Any] = {
        "token_ids": done.tokens,
        "text": text,
        "finish_reason": done.reason,
        "matched": done.matched,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "queue_ms": round(times.queue_ms, 3),
            "prefill_ms": round(times.prefill_ms, 3),
            "ttft_ms": round(times.ttft_ms, 3),
            "decode_ms": round(times.decode_ms, 3),
            "steps": [step_json(step) for step in done.steps],
        },
    }
    if done.constraint is not None:
        told = done.constraint
        held["constraint"] = {
            "complete": told.complete,
            "ignored": list(told.ignored),
            "schema_valid": told.schema_valid,
            "forced": told.forced,
        }
    if done.logprobs is not None:
        held["logprobs"] = [
            {
                "token_id": scored.token,
                "token": tokenizer.token_text(scored.token),
                "logprob": max(scored.logprob, FLOOR),
                "top": [
                    {
                        "token_id": i,
                        "token": tokenizer.token_text(i),
                        "logprob": max(logprob, FLOOR),
                    }
                    for i, logprob in scored.top
                ],
            }
            for scored in done.logprobs
        ]
    return held
