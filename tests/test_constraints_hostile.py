"""Hostile and unlucky constraints on a whole server: the public bug reports' cases 14 and 16 to 20.

Beside what is meant to freeze the server a stream goes on, whose text and pace are looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from spec_serve.client import SyncClient
from tests.api.tokens import TinyTokens
from tests.servers import TRANSPORTS, Server, ask, start, strict
from tests.tiny import write_tiny_model_dir

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "Is ice cold? Reply as JSON."}]
FLAGS = ("--max-context", "1536", "--kv-tokens", "8000", "--max-rows", "8")
# Seconds of the server's processor time, which other programs don't stretch. Some of these take
# minutes where nothing bounds them.
MOST_S = 5.0  # until any of them is answered, the stream's steps included
MOST_GAP_S = 1.5  # between two steps of the stream
MOST_BYTES = 500 << 20


@pytest.fixture(scope="module", params=["thread", "process"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = write_tiny_model_dir(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ("--engine-process",) if request.param == "process" else ()
    with start(model, log, *FLAGS, *flags) as running:
        yield running
        running.wait_idle()
        said = log.read_text()
        assert running.process.poll() is None
    assert "Traceback" not in said and "rror" not in said, said


def post(server: Server, path: str, body: Any) -> httpx.Response:
    form = {"content": body} if isinstance(body, bytes) else {"json": body}
    url = server.http + path
    for _ in range(20):
        answer = httpx.post(url, **form, timeout=60, trust_env=False, verify=False)
        if answer.status_code != 503:  # others are being compiled: what to do about it is to wait
            break
    return answer


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {
        "type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}
    }}  # fmt: skip


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "boolean"}
    for _ in range(levels):
        made = {"type": "array", "items": made}
    return made


def alternatives(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        made = {"oneOf": [{"type": "object", "properties": {"a": made}}, {"type": "array",
                "items": made}, made]}  # fmt: skip
    return made


HOSTILE: dict[str, dict[str, Any]] = {
    "nested 60 deep": form(deep(60)),
    "nested 400 deep": form(deep(400)),
    "itself": form({"$ref": "#"}),
    "round and round": form({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                             "$ref": "#/$defs/a"}),
    "20,000 names": form({"type": "object", "properties": {f"n{i}": {} for i in range(20_000)}}),
    "5,000 names needed": form(
        {"type": "object", "properties": {f"n{i}": {"type": "null"} for i in range(5_000)},
         "required": [f"n{i}" for i in range(5_000)], "additionalProperties": False}
    ),
    "50,000 words": form({"enum": [f"word {i}" for i in range(50_000)]}),
    "12,000 words": form({"enum": [f"word {i}" for i in range(12_000)]}),
    "alternatives": form(alternatives(7)),
    "divisors": form({"allOf": [{"multipleOf": n} for n in (9973, 9967, 9949)]}),
    "a pattern in a schema": form({"type": "string", "pattern": "(a{1,800}){1,800}"}),
    "another world": form({"$ref": "http://127.0.0.1:1/schema.json"}),
    "repeats": {"guided_regex": "(a{1,800}){1,800}"},
    "two kinds of repeats": {"guided_regex": "(a{1,1000}b{1,1000}){1,1000}"},
    "two billion": {"guided_regex": "a{2000000000}"},
    "plus of plus": {"guided_regex": "((((a+)+)+)+)+$"},
    "open": {"guided_regex": "("},
    "a long one": {"guided_regex": "(ab|cd)?" * 20_000},
    "100,000 choices": {"guided_choice": [str(i) for i in range(100_000)]},
    "an ambiguous grammar": {"guided_grammar": "start: start start start | A | \nA: /a*/"},
    "a left-recursive one": {"guided_grammar": "start: x\nx: x x | x | \"a\""},
    "rules": {"guided_grammar": "start: r0\n" + "\n".join(
        f"r{i}: r{i + 1} r{i + 1} | \"a\"" for i in range(2_000)) + "\nr2000: \"a\""},
}  # fmt: skip


def test_case_19_hostile_constraints_freeze_nobody(server: Server) -> None:
    """Each twice at once beside a stream: answered after little work, with 400 or with a text."""
    host = psutil.Process(server.process.pid)
    times: list[float] = []
    ended = [False]

    def spent() -> float:
        total = sum(host.cpu_times()[:2])
        for child in host.children():  # an engine in a process of its own is one
            with suppress(psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:2])
        return total

    def stream() -> None:
        with SyncClient(server.ws) as client:
            while not ended[0]:
                for _ in client.generate(prompt="abc", max_tokens=400, ignore_eos=True, ids=True):
                    times.append(spent())

    before = memory(host)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(stream)
        try:
            for name, fields in HOSTILE.items():
                path = CHAT if "response_format" in fields else TEXT
                body = {"max_tokens": 4, **fields}
                body |= {"messages": TURNS} if path == CHAT else {"prompt": "a"}
                begun = spent()
                answers = [*pool.map(lambda one: post(server, *one), [(path, body)] * 2)]
                took = spent() - begun
                for answer in answers:
                    assert answer.status_code in (200, 400), (name, answer.text[:300])
                    if answer.status_code == 400:
                        error = answer.json()["error"]
                        assert error["param"] in fields, (name, error)
                        assert len(error["message"]) < 1000
                assert len({answer.status_code for answer in answers}) == 1, name
                assert took < MOST_S, (name, took)
        finally:
            ended[0] = True
        running.result(60)
    assert max(later - sooner for sooner, later in zip(times, times[1:], strict=False)) < MOST_GAP_S
    assert memory(host) - before < MOST_BYTES


def memory(process: psutil.Process) -> int:
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
      "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_case_16_nothing_is_asked_of_a_grammar_that_has_ended(
    server: Server, stream: bool
) -> None:
    """16 at once, each second one free text, which is what it is without the others."""
    free: dict[str, Any] = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}
    alone = ask(server, "grpc", **free)

    def one(i: int) -> None:
        if i % 2:
            assert ask(server, "grpc", **free).told == alone.told
            return
        body = {"messages": TURNS, "max_tokens": 60, "temperature": i // 2 % 2, "stream": stream,
                "speculation": {"mode": "max", "max_nodes": (8, 15)[i // 4 % 2]}, **form(OK)}
        answer = post(server, CHAT, body)
        assert answer.status_code == 200, answer.text
        if not stream:
            (choice,) = answer.json()["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        else:
            lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
            chunks = [strict(line.removeprefix("data: "))["choices"][0] for line in lines]
            text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
            reason = chunks[-1]["finish_reason"]
        assert strict(text) in ({"ok": True}, {"ok": False}) and text.endswith("}")
        assert reason == "stop"

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(16)))
    answer = post(server, CHAT, {"messages": TURNS, "ignore_eos": True, **form(OK)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ignore_eos")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_14_17_dates_with_logprobs_are_finite_and_guessed(
    server: Server, transport: str
) -> None:
    date = {"kind": "regex", "source": "on [0-9]{4}-[0-9]{2}-[0-9]{2} at noon"}
    for temperature in (0, 1, 1.5):
        asked: dict[str, Any] = {
            "prompt": "Write a long poem about the sea.", "max_tokens": 40, "constraint": date,
            "sampling": {"temperature": temperature, "seed": 3}, "logprobs": 5,
        }  # fmt: skip
        off = ask(server, "grpc", **asked, mode="off")
        got = ask(server, transport, **asked, mode="max")
        assert re.fullmatch(date["source"], got.text) and got.told[:2] == off.told[:2]
        assert got.accepted > 0 and off.drafted == 0
        assert len(got.scores) == len(got.tops) == got.counted
        assert all(-9999 <= score <= 0 for row in (got.scores, *got.tops) for score in row)


TOKENS = TinyTokens()
WHITE = [i for i in range(TOKENS.vocab_size) if TOKENS.token_bytes(i).isspace()]


@pytest.mark.parametrize("whitespace", ["bounded", "compact"])
def test_case_18_white_space_ends(server: Server, whitespace: str) -> None:
    """The model likes nothing better than blanks."""
    schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": 12}
              for name in "ab"}, "required": ["a", "b"], "additionalProperties": False}
    asked: dict[str, Any] = {
        "prompt": "Two cities as JSON.", "max_tokens": 300,
        "constraint": {
            "kind": "json_schema", "source": json.dumps(schema), "whitespace": whitespace
        },
        "sampling": {"logit_bias": {str(i): 8.0 for i in WHITE}},
    }  # fmt: skip
    off = ask(server, "grpc", **asked, mode="off")
    got = ask(server, "http", **asked, mode="max")
    assert got.told[:2] == off.told[:2] and got.reason == "stop"
    assert set(strict(got.text)) == {"a", "b"}
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', got.text)
    runs = [len(run) for run in re.findall(r"\s+", outside)]
    assert max(runs, default=0) <= 21 and bool(runs) == (whitespace == "bounded")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_20_forced_characters_are_whole(server: Server, transport: str) -> None:
    group = "\U0001f600\u6f22\u5b57\u00e9\U0001f469\u200d\U0001f467a"
    got = ask(
        server, transport, prompt="x", max_tokens=600, mode="max",
        constraint={"kind": "regex", "source": f"({group}){{12}}"},
    )  # fmt: skip
    assert got.text == group * 12 and got.reason == "stop"
    assert not any("\ufffd" in chunk for chunk in got.chunks)
    assert got.constraint is not None and got.constraint.forced > 200
