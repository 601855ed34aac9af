"""Which tests stand for which of the 30 public bug reports; each is named by at least one.

| cases | where | transports |
|---|---|---|
| 1, 4 to 15, 22, 23, 27, 29, 30 | test_public_bugs_transports.py | WebSocket (both), gRPC, HTTP |
| 20, 21 | the same; SSE's own shapes in api/test_openai.py | all four |
| 28 | test_faults.py, at every event and by every way to go | all four |
| 17 to 19 | test_public_bugs_table.py: refused by name until there are constraints | all four |
| 2, 3, 24, 25, 26 | test_public_bugs*.py, cache/, spec/: no transport sees them | none |
| 16 | waits for structured output | |

5, 7, 8, 13, 15, 21, 27, 29 also run with the engine in a process of its own.
"""

from __future__ import annotations

import ast
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from spec_serve.api import messages as m
from spec_serve.cache.tree import trie
from spec_serve.spec.request import Sampling
from tests.api.processes import echo_server
from tests.servers import Server, ask, refusal
from tests.spec.test_verify import first_tokens, many

TESTS = Path(__file__).parent
WAITING = {16}  # for structured output
EVERYWHERE = {1, *range(4, 16), 20, 21, 22, 23, 27, 28, 29, 30} - {5, 6, 20, 27}
ALL_AT_ONCE = {5, 6, 20, 27}  # go through all transports within one test


def named() -> dict[int, list[tuple[str, ast.FunctionDef]]]:
    """Case -> (file, test) of those whose names carry its number."""
    found: dict[int, list[tuple[str, ast.FunctionDef]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_case_"):
                for number in re.findall(r"_(\d\d)(?=_)", node.name):
                    found.setdefault(int(number), []).append((path.name, node))
    return found


def test_each_case_is_named_by_a_test() -> None:
    assert set(range(1, 31)) - WAITING <= set(named()) <= set(range(1, 31))


def test_each_case_that_concerns_transports_is_tried_on_all_of_them() -> None:
    files = ("test_public_bugs_transports.py", "test_faults.py")
    tests = named()
    for number in EVERYWHERE | ALL_AT_ONCE:
        mine = [node for name, node in tests[number] if name in files]
        spread = [node for node in mine if "transport" in {arg.arg for arg in node.args.args}]
        at_once = [node for node in mine if "TRANSPORTS" in ast.unparse(node)]
        assert at_once if number in ALL_AT_ONCE else spread, number


def test_case_03_a_child_chosen_by_rank_is_a_point_mass() -> None:
    """The report's first trial: taken for a sample of q = p, token 0 would come every time.

    The other three are in spec/test_verify.py."""
    p, trials = (0.6, 0.4, 0.0), 50_000
    warm, logits = Sampling(temperature=1.0), torch.tensor(p).log()
    seeds = range(trials, 2 * trials)
    verdict, batch, _ = many(lambda _: logits, warm, [trie([0], [[0]])] * trials, seeds, 3)
    shares = np.bincount(first_tokens(verdict, batch).numpy(), minlength=3) / trials
    assert np.abs(shares - np.array(p)).max() < 0.01
    assert (verdict.accepted <= 1).all()


def schema(inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "r", "schema": inner}}


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels):
        made = {"items": made}
    return made


NAMES = {f"n{i}": {"type": "string"} for i in range(20_000)}
HOSTILE: list[dict[str, Any]] = [
    schema(deep(400)),
    schema({"$ref": "#"}),
    schema({"type": "object", "properties": NAMES}),
    schema({"enum": [f"word {i}" for i in range(50_000)]}),
    {"type": "regex", "pattern": "(a{1,800}){1,800}"},
    {"type": "regex", "pattern": "a{2000000000}"},
    {"type": "regex", "pattern": "((((a+)+)+)+)+$"},
    {"type": "regex", "pattern": "("},
    schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}}),
    {"type": "json_object"},
]


def test_case_17_18_19_no_constraint_is_dropped_in_silence_or_freezes_anybody(
    tmp_path: Path,
) -> None:
    """Each twice at once beside a stream, whose text and pace stay; each answered by name."""
    text = "what was asked comes back " * 6
    with echo_server({"pause": 0.01}) as running:
        server = Server(running.process, running.ws, running.grpc, running.health, tmp_path)
        asked: dict[str, Any] = {"prompt": text, "max_tokens": 400, "ignore_eos": True}
        alone = ask(server, "grpc", **asked)
        bodies = [
            ("/v1/completions", {"prompt": "a", "max_tokens": 4, "response_format": form})
            if form["type"] == "regex"
            else (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a"}], "response_format": form},
            )
            for form in HOSTILE
        ]
        # What no encoder would write: nested deeper than a reader may go.
        nested = (
            b'{"messages":[{"role":"user","content":"a"}],"response_format":' + b'{"items":' * 3000
        )

        def say(path: str, body: Any) -> httpx.Response:
            form = {"content": body} if isinstance(body, bytes) else {"json": body}
            url = server.http + path
            return httpx.post(url, **form, timeout=60, trust_env=False, verify=False)  # type: ignore[arg-type]

        with ThreadPoolExecutor(3) as pool:
            stream = pool.submit(ask, server, "grpc", **asked)
            for path, body in bodies:
                begun = time.monotonic()
                for answer in [*pool.map(lambda one: say(*one), [(path, body)] * 2)]:
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == "response_format"
                assert time.monotonic() - begun < 40
            answer = say("/v1/chat/completions", nested + b"}" * 3001)
            assert answer.status_code == 400 and answer.json()["error"]["message"]
            assert stream.result(60).told == alone.told


def test_case_17_gateways_and_sockets_hear_of_it_too(tmp_path: Path) -> None:
    vllm = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")
    calls = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
    with echo_server() as running, grpc.insecure_channel(running.grpc) as channel:
        stub = calls.VllmEngineStub(channel)
        for constraint in (
            {"regex": "[0-9]{4}"}, {"json_schema": '{"type":"object"}'}, {"json_object": True},
        ):  # fmt: skip
            sampling = vllm.SamplingParams(**constraint)
            request = vllm.GenerateRequest(request_id="r", text="a", sampling_params=sampling)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, timeout=60))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert next(iter(constraint)) in caught.value.details()
        server = Server(running.process, running.ws, running.grpc, running.health, tmp_path)
        for codec in (m.JSON, m.MSGPACK):
            form = {"type": "regex", "pattern": "[0-9]{4}"}
            code, _, message = refusal(server, codec, prompt="a", response_format=form)
            assert code == "invalid_request" and "response_format" in message
