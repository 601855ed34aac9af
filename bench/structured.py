"""Structured output: is it valid, what does it cost, and is it quicker than trying until it is.

Four parts, any of which can be left out: `validity`, generated schemas at temperatures 0 and 1,
judged by jsonschema; `pace`, time per token of six grammars with a constraint against without,
speculation on, by turns; `order`, JSON of one schema against sampling freely, validating and trying
again; `compile`, how long schemas take, and how long hostile ones until they are refused.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from spec_serve.bench.latency import percentile
from spec_serve.bench.report import table, write_json
from spec_serve.bench.running import Run, run
from spec_serve.bench.schemas import EXAMPLE, ORDER, Asked, made, orders
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.compiler import Compiler, due
from spec_serve.spec.engine import Engine
from spec_serve.spec.load import build_engine
from spec_serve.spec.request import Constraint, RequestError, Sampling
from spec_serve.target.tokenizer import Tokenizer

PARTS = ("validity", "pace", "order", "compile")
NESTED = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 24},
        "items": {
            "type": "array", "minItems": 1, "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "product_name": {"type": "string", "maxLength": 24},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["product_name", "quantity"],
                "additionalProperties": False,
            },
        },
        "delivery_method": {"enum": ["standard", "express", "pick-up"]},
    },
    "required": ["customer", "items", "delivery_method"],
    "additionalProperties": False,
}  # fmt: skip
SIMPLE = {
    "type": "object",
    "properties": {
        "name_of_person": {"type": "string", "maxLength": 24},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_employed": {"type": "boolean"},
    },
    "required": ["name_of_person", "age_in_years", "is_employed"],
    "additionalProperties": False,
}
SIX: dict[str, tuple[Constraint, str]] = {
    "simple json": (
        Constraint("json_schema", json.dumps(SIMPLE), whitespace="compact"),
        "Describe person number {i} as JSON with name_of_person, age_in_years and is_employed.",
    ),
    "nested json": (
        Constraint("json_schema", json.dumps(NESTED), whitespace="compact"),
        "Write order number {i} as JSON with customer, items and delivery_method.",
    ),
    "date-time": (
        Constraint("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"),
        "Write a date and time of the year {i} in ISO 8601.",
    ),
    "sql": (
        Constraint("name", "sql_select"),
        "Write an SQL query for the {i} best customers with their orders.",
    ),
    "expressions": (
        Constraint(
            "lark",
            'start: sum\nsum: product (("+" | "-") product)*\n'
            'product: atom (("*" | "/") atom)*\natom: /[0-9]{1,4}/ | "(" sum ")" | NAME\n'
            "NAME: /[a-z]{1,8}/\n",
        ),
        "Write an arithmetic expression with {i} terms.",
    ),
    "choices": (
        Constraint(
            "choices",
            json.dumps(["billing question", "technical problem", "delivery delayed",
                        "return of goods", "something else entirely"]),
        ),
        "What is message {i} about: 'My parcel still has not come'?",
    ),
}  # fmt: skip


def _alternatives(depth: int) -> dict[str, Any]:
    """oneOf in oneOf, whose branches can't be told apart."""
    if not depth:
        return {"type": "integer"}
    inner = _alternatives(depth - 1)
    return {"oneOf": [{"type": "array", "items": inner}, {"type": "object", "required": ["a"],
                                                          "properties": {"a": inner}}]}  # fmt: skip


HOSTILE: dict[str, Constraint] = {
    "nested repeats": Constraint("regex", "(a{1,1000}b{1,1000}){1,1000}"),
    "many divisors": Constraint(
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"multipleOf": 997 - i} for i in range(30)}}),
    ),
    "deep oneOf": Constraint("json_schema", json.dumps(_alternatives(12))),
    "many strings": Constraint(
        "json_schema", json.dumps({"enum": [f"string number {i}" for i in range(20_000)]})
    ),
    "many names": Constraint(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"name_{i}": {} for i in range(20_000)}}),
    ),
    "many patterns": Constraint(
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(300)]}),
    ),
    "very deep": Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
}


@dataclass(slots=True)
class Bench:
    """An engine, its tokenizer, and a number for salts, so that no answer knows another."""

    engine: Engine
    tokenizer: Tokenizer
    salts: int = 0

    def ask(
        self, prompt: str, most: int, constraint: Constraint | None, temperature: float, seed: int
    ) -> Run:
        """One answer to one message, in a namespace of the cache of its own."""
        self.salts += 1
        ids = self.tokenizer.render_chat([{"role": "user", "content": prompt}])
        return run(
            self.engine, ids, most, sampling=Sampling(temperature=temperature, seed=seed),
            eos=self.tokenizer.eos_ids, salt=f"bench{self.salts}", constraint=constraint,
        )  # fmt: skip

    def text(self, answer: Run) -> str:
        """What it says."""
        return self.tokenizer.decode(answer.tokens)


def fits(text: str, schema: Any) -> bool:
    """Whether a text is JSON that jsonschema finds valid, formats included."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checker = Draft202012Validator.FORMAT_CHECKER
    return bool(Draft202012Validator(schema, format_checker=checker).is_valid(value))


def validity(bench: Bench, asked: list[Asked], temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Every schema at every temperature; `wrong` names finished answers that are not valid."""
    finished = cut = tokens = forced = 0
    wrong: list[str] = []
    for number, one in enumerate(asked):
        constraint = Constraint("json_schema", json.dumps(one.schema))
        for temperature in temperatures:
            answer = bench.ask(one.prompt, 600, constraint, temperature, number)
            tokens += len(answer.tokens)
            told = answer.constraint
            assert told is not None
            forced += told.forced
            if answer.reason != "stop":
                cut += 1
                continue
            finished += 1
            text = bench.text(answer)
            if not (fits(text, one.schema) and told.complete and told.schema_valid):
                wrong.append(f"{one.name} at {temperature}: {text}")
    return {
        "answers": finished + cut, "finished": finished, "cut short": cut,
        "valid": finished - len(wrong), "tokens": tokens, "forced": forced, "wrong": wrong,
    }  # fmt: skip


def pace(bench: Bench, prompts: int, most: int = 96) -> list[dict[str, Any]]:
    """Milliseconds per token after the first, with a constraint and without, by grammar."""
    records: list[dict[str, Any]] = []
    sums = {"with": [0.0, 0], "without": [0.0, 0]}
    for name, (constraint, wording) in SIX.items():
        own = {"with": [0.0, 0], "without": [0.0, 0]}
        forced = steps = 0
        for i in range(prompts):
            pair: dict[str, Run] = {}
            for which in ("with", "without") if i % 2 else ("without", "with"):
                used = constraint if which == "with" else None
                pair[which] = bench.ask(wording.format(i=i + 2), most, used, 0.0, i)
            for which, answer in pair.items():
                for totals in (own[which], sums[which]):
                    totals[0] += answer.decode_s * 1e3
                    totals[1] += len(answer.tokens) - 1
            told = pair["with"].constraint
            forced += told.forced if told is not None else 0
            steps += len(pair["with"].steps)
        records.append({**_pace(name, own), "forced": forced, "steps": steps})
    records.append({**_pace("ALL", sums)})
    return records


def _pace(name: str, sums: dict[str, list[float]]) -> dict[str, Any]:
    each = {which: ms / max(count, 1) for which, (ms, count) in sums.items()}
    return {
        "grammar": name,
        "with ms/token": each["with"],
        "without ms/token": each["without"],
        "with/without": each["with"] / max(each["without"], 1e-9),
        "tokens": sums["with"][1],
    }


def order(bench: Bench, count: int, tries: int, temperature: float = 0.7) -> dict[str, Any]:
    """Seconds until there is a valid order, constrained and by trying again.

    Whoever tries freely is shown an example, and gives up after `tries` (which counts as the time
    it took until then, so the ratio is a lower bound).
    """
    constraint = Constraint("json_schema", json.dumps(ORDER), whitespace="compact")
    ask = (
        "Write the order as compact JSON. Example: "
        + json.dumps(EXAMPLE, separators=(",", ":"))
        + "\nOrder: "
    )
    times = {"forced": 0.0, "retried": 0.0}
    valid = {"forced": 0, "retried": 0}
    asked = 0

    def forced(prompt: str, number: int) -> bool:
        answer = bench.ask(prompt, 300, constraint, temperature, number)
        return fits(bench.text(answer), ORDER)

    def retried(prompt: str, number: int) -> bool:
        nonlocal asked
        for attempt in range(tries):
            asked += 1
            answer = bench.ask(prompt, 300, None, temperature, number * 1000 + attempt)
            if fits(_between_braces(bench.text(answer)), ORDER):
                return True
        return False

    ways: dict[str, Callable[[str, int], bool]] = {"forced": forced, "retried": retried}
    for number, words in enumerate(orders(count)):
        for name in ("forced", "retried") if number % 2 else ("retried", "forced"):
            begun = time.perf_counter()
            valid[name] += ways[name](ask + words, number)
            times[name] += time.perf_counter() - begun
    return {
        "orders": count,
        "forced valid": valid["forced"], "forced s": times["forced"] / count,
        "retried valid": valid["retried"], "retried s": times["retried"] / count,
        "tries": asked / count, "ratio": times["retried"] / times["forced"],
    }  # fmt: skip


def _between_braces(text: str) -> str:
    """The JSON in an answer that may say something around it."""
    return text[text.find("{") : text.rfind("}") + 1]


def suite_schemas(folder: Path) -> list[str]:
    """All schemas of a JSON-Schema-Test-Suite folder, as JSON text."""
    files = sorted(folder.glob("*.json"))
    return [json.dumps(group["schema"]) for path in files for group in json.loads(path.read_text())]


def _names(number: int) -> dict[str, Any]:
    """Properties that take long to compile."""
    return {"type": "object", "properties": {f"n{number}_{i}": {} for i in range(15_000)}}


def answered(compiler: Compiler, constraints: list[Constraint]) -> list[str]:
    """What a server would answer to these, arriving together, and after how long."""
    arrived = time.monotonic()
    until = due(arrived)

    def answer(constraint: Constraint) -> str:
        try:
            compiler.begin(constraint, until).result(max(0.0, until - time.monotonic()))
            said = "compiled"
        except TimeoutError:
            said = "overloaded"
        except RequestError as error:
            said = "refused" if error.code == "invalid_request" else error.code
        return f"{said} in {(time.monotonic() - arrived) * 1e3:.0f} ms"

    with ThreadPoolExecutor(len(constraints)) as pool:
        return list(pool.map(answer, constraints))


def compiling(tokenizer: Tokenizer, sources: list[str]) -> dict[str, Any]:
    """Milliseconds to compile, or to refuse, each schema; and hostile constraints."""
    compiler = Compiler(tokenizer)
    compiler.compile(Constraint("regex", "a"))  # the vocabulary, and the process that tries out
    times, refused = [], 0
    for source in sources:
        begun = time.perf_counter()
        try:
            compiler.compile(Constraint("json_schema", source))
        except RequestError:
            refused += 1
        times.append((time.perf_counter() - begun) * 1e3)
    hostile = {name: answered(compiler, [one])[0] for name, one in HOSTILE.items()}
    many = [
        Constraint("json_schema", json.dumps({"anyOf": [_names(n), True], "description": str(n)}))
        for n in range(12)
    ]
    hostile["twelve at once"] = ", ".join(answered(compiler, many))
    return {
        "schemas": len(sources), "refused": refused, "p50 ms": percentile(times, 0.5),
        "p95 ms": percentile(times, 0.95), "max ms": max(times), "hostile": hostile,
    }  # fmt: skip


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="spec-serve bench structured", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--schemas", type=int, default=100, help="generated schemas")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each of the six")
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--tries", type=int, default=5, help="free attempts at one order")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite", default="", help="folder of JSON-Schema-Test-Suite files")
    parser.add_argument("--json", default="", help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Command line of the bench; 1 if a finished answer is not valid."""
    args = arguments(argv)
    options = EngineOptions(target=args.target, draft=args.draft, max_rows=1, kv_fraction=0.2)
    engine, tokenizer = build_engine(options)
    bench = Bench(engine, tokenizer)
    asked = made(args.schemas, args.seed)
    report: dict[str, Any] = {"bench": "structured", "options": vars(args)}
    wrong: list[str] = []
    if "validity" in args.parts:
        report["validity"] = found = validity(bench, asked, (0.0, 1.0))
        wrong = found.pop("wrong")
        table([found])
        print(*wrong, sep="\n")
    if "pace" in args.parts:
        report["pace"] = pace(bench, args.prompts)
        table(report["pace"])
    if "order" in args.parts:
        report["order"] = order(bench, args.orders, args.tries)
        table([report["order"]])
    if "compile" in args.parts:
        sources = [json.dumps(one.schema) for one in asked]
        if args.suite:
            sources = suite_schemas(Path(args.suite))
        report["compile"] = compiling(tokenizer, sources)
        hostile = report["compile"].pop("hostile")
        table([report["compile"]])
        for name, said in hostile.items():
            print(f"{name}: {said}")
        report["hostile"] = hostile
    write_json(args.json, report)
    return 1 if wrong else 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
