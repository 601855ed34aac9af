"""A real `spec-serve` process, and one way to ask it over each transport; for whole-server tests.

Answers come in one form whatever carried them, so that they can be compared. Imported by tests
only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.client import Client

CONTEXT = 160
TRANSPORTS = (m.JSON, m.MSGPACK, "grpc", "http")
MODES = {"auto": pb.Speculation.AUTO, "off": pb.Speculation.OFF, "max": pb.Speculation.MAX}


# As `spec-serve` itself, but that on a busy machine a constraint is waited for and not put off.
_START = (
    "from spec_serve.spec import compiler; compiler.ANSWER_S = 60.0; "
    "from spec_serve.api.cli import main; raise SystemExit(main())"
)


@dataclasses.dataclass
class Server:
    """A running process and its addresses."""

    process: subprocess.Popen[str]
    ws: str
    grpc: str
    health: str
    log: Path

    @property
    def http(self) -> str:
        return self.health.removesuffix("/health")

    def stats(self) -> Any:
        with grpc.insecure_channel(self.grpc) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).stats

    def wait_idle(self, quiet_looks: int = 1) -> Any:
        """Wait until nothing runs or waits; the counters then.

        quiet_looks: how often in a row they must be the same.
        """
        end, before, same = time.monotonic() + 60.0, None, 0
        while True:
            now = self.stats()
            same = same + 1 if now == before else 1
            if same >= quiet_looks and not (now.running or now.waiting):
                return now
            assert time.monotonic() < end, now
            before = now
            time.sleep(0.05)


@contextmanager
def start(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    """`spec-serve` on free ports; its log goes to a file, so that no pipe can fill up.

    Of a flag that is given twice the last one counts."""
    command = [
        sys.executable, "-P", "-c", _START, "--target", str(model),
        "--draft", str(model), "--model-name", "tiny", "--port", "0", "--grpc-port", "0",
        "--kv-tokens", "2048", "--max-rows", "4", "--max-context", str(CONTEXT), "--quiet",
        "--max-nodes", "8", *flags,
    ]  # fmt: skip
    # Threads of several processes would wait for each other on a machine of few cores.
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPEC_SERVE_")}
    with log.open("w") as stderr, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(4)]
            assert lines[0] == "spec-serve is ready", log.is_file() and log.read_text()
            found = dict(line.split("://", 1) for line in lines[1:])
            yield Server(
                process, "ws://" + found["ws"], found["grpc"], "http://" + found["http"], log
            )
        finally:
            if process.poll() is None:
                process.kill()


@dataclasses.dataclass
class Got:
    """An answer, whatever carried it."""

    text: str
    ids: list[int]
    reason: str
    matched: int | str | None
    counted: int
    drafted: int
    accepted: int
    chunks: list[str]
    cached: int = 0
    scores: list[float] = dataclasses.field(default_factory=list)
    tops: list[list[float]] = dataclasses.field(default_factory=list)
    constraint: m.Constrained | None = None

    @property
    def told(self) -> tuple[str, list[int], str, int | str | None, int]:
        return self.text, self.ids, self.reason, self.matched, self.counted


async def ask_socket(client: Client, **fields: Any) -> Got:
    events = [event async for event in client.generate(ids=True, **fields)]
    assert [event.seq for event in events] == list(range(len(events)))
    deltas = [event for event in events if isinstance(event, m.Delta)]
    last = events[-1]
    assert isinstance(events[0], m.Started) and isinstance(last, m.Finished)
    summary = last.speculation
    assert summary is not None
    return Got(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.ids],
        last.reason, last.matched, last.usage.completion_tokens,
        summary.drafted, summary.accepted, [delta.text for delta in deltas],
        last.usage.cached_tokens,
        [entry.logprob for delta in deltas for entry in delta.logprobs],
        [[score for _, score, _ in entry.top] for delta in deltas for entry in delta.logprobs],
        last.constraint,
    )  # fmt: skip


def to_proto(**fields: Any) -> pb.GenerateRequest:
    """The same request as protobuf has it."""
    stop = pb.Stop(
        min_tokens=fields.get("min_tokens", 0), strings=fields.get("stop", []),
        token_ids=fields.get("stop_token_ids", []), ignore_eos=fields.get("ignore_eos", False),
    )  # fmt: skip
    if "max_tokens" in fields:
        stop.max_tokens = fields["max_tokens"]
    sampling = dict(fields.get("sampling", {}))
    bias = {int(token): value for token, value in sampling.pop("logit_bias", {}).items()}
    request = pb.GenerateRequest(
        sampling=pb.Sampling(logit_bias=bias, **sampling),
        stop=stop,
        output=pb.Output(token_ids=True),
        speculation=pb.Speculation(mode=MODES[fields.get("speculation", {}).get("mode", "auto")]),
    )
    if "constraint" in fields:
        request.constraint.CopyFrom(to_constraint(**fields["constraint"]))
    if "logprobs" in fields:
        request.output.logprobs = fields["logprobs"]
    if "prompt" in fields:
        request.prompt = fields["prompt"]
    if "token_ids" in fields:
        request.token_ids.ids[:] = fields["token_ids"]
    if "messages" in fields:
        request.chat.messages.extend(pb.Message(**turn) for turn in fields["messages"])
        request.chat.SetInParent()
    return request


def to_constraint(
    kind: str, source: str = "", whitespace: str = "bounded", strict: bool = True, **more: Any
) -> pb.Constraint:
    """The same constraint as protobuf has it."""
    kinds: dict[str, Any] = {kind: source or True}
    if kind == "choices":
        kinds = {kind: pb.Choices(texts=json.loads(source))}
    white = pb.Whitespace.Value(f"WHITESPACE_{whitespace.upper()}")
    return pb.Constraint(whitespace=white, lenient=not strict, **kinds, **more)


def _constrained(told: pb.Constrained) -> m.Constrained:
    known = told.schema_valid if told.HasField("schema_valid") else None
    return m.Constrained(told.complete, list(told.ignored), known, told.forced)


def ask_grpc(stub: Any, **fields: Any) -> Got:
    """One generation by gRPC."""
    events = list(stub.Generate(to_proto(**fields), timeout=60))
    assert [event.seq for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.HasField("delta")]
    last = events[-1].finished
    kind = last.WhichOneof("matched")
    return Got(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        pb.Finished.Reason.Name(last.reason).lower(), getattr(last, kind) if kind else None,
        last.usage.completion_tokens, last.speculation.drafted, last.speculation.accepted,
        [delta.text for delta in deltas], last.usage.cached_tokens,
        [entry.logprob for delta in deltas for entry in delta.logprobs],
        [[top.logprob for top in entry.top] for delta in deltas for entry in delta.logprobs],
        _constrained(last.constraint) if last.HasField("constraint") else None,
    )  # fmt: skip


def to_openai(**fields: Any) -> tuple[str, dict[str, Any]]:
    """The same request as OpenAI's clients send it: path and body."""
    body = {**fields, **fields.get("sampling", {})}
    body.pop("sampling", None)
    if "token_ids" in body:
        body["prompt"] = body.pop("token_ids")
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", body


def ask_http(server: Server, **fields: Any) -> Got:
    """One generation as server-sent events."""
    path, body = to_openai(**fields)
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(server.http + path, json=body, timeout=60, trust_env=False, verify=False)
    assert answer.status_code == 200, answer.text
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    *chunks, last = [strict(line.removeprefix("data: ")) for line in lines]
    said = [chunk["choices"][0] for chunk in chunks]
    texts = [one["delta"].get("content", "") if "delta" in one else one["text"] for one in said]
    ids = [token for one in said for token in one.get("token_ids", [])]
    (ended,) = [one for one in said if one["finish_reason"] is not None]
    scores = [one["logprobs"] for one in said if one.get("logprobs")]
    # As with vLLM, the model's own end is not named.
    own = ids[-1] if ended["finish_reason"] == "stop" else None
    return Got(
        "".join(texts), ids, ended["finish_reason"], ended.get("stop_reason", own),
        last["usage"]["completion_tokens"],
        last["timings"]["draft_n"], last["timings"]["draft_n_accepted"], texts,
        last["usage"]["prompt_tokens_details"]["cached_tokens"],
        [score for one in scores for score in one["token_logprobs"]],
        [list(top.values()) for one in scores for top in one["top_logprobs"]],
        m.Constrained(**ended["constraint"]) if "constraint" in ended else None,
    )  # fmt: skip


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def ask(server: Server, transport: str, **fields: Any) -> Got:
    """One generation, `mode` of speculation as a plain word."""
    if "mode" in fields:
        fields["speculation"] = {"mode": fields.pop("mode")}
    if transport == "http":
        return ask_http(server, **fields)
    if transport == "grpc":
        with grpc.insecure_channel(server.grpc) as channel:
            return ask_grpc(pb_grpc.SpecServeStub(channel), **fields)

    async def go() -> Got:
        async with Client(server.ws, transport) as client:
            return await ask_socket(client, **fields)

    return asyncio.run(go())


def post(server: Server, path: str, body: Any = None) -> Any:
    """The answer's JSON."""
    url = server.http + path
    return httpx.post(url, json=body, timeout=60, trust_env=False, verify=False).json()


def prompt_tokens(server: Server, transport: str, **fields: Any) -> int:
    """How many tokens the server makes of it."""
    fields["max_tokens"] = 1
    if transport == "http":
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        answer = post(server, path, fields)
        return int(answer["usage"]["prompt_tokens"])
    if transport == "grpc":
        with grpc.insecure_channel(server.grpc) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            first: pb.GenerateEvent = next(stub.Generate(to_proto(**fields), timeout=60))
            return int(first.started.prompt_tokens)

    async def go() -> int:
        async with Client(server.ws, transport) as client:
            async for event in client.generate(**fields):
                if isinstance(event, m.Started):
                    return event.prompt_tokens
        raise AssertionError

    return asyncio.run(go())


def refusal(server: Server, transport: str, **fields: Any) -> tuple[str, str, str]:
    """Ask for what must be refused: (code, field, message). The server says it, not the client."""
    if transport == "http":
        path, body = to_openai(**fields)
        url = server.http + path
        answer = httpx.post(url, json=body, timeout=60, trust_env=False, verify=False)
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500
        return error["code"], error["param"] or "", error["message"]
    if transport == "grpc":
        with grpc.insecure_channel(server.grpc) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            try:
                list(stub.Generate(to_proto(**fields), timeout=60))
            except grpc.RpcError as error:
                return from_status(error)
    else:
        codec = m.Codec(transport)
        with connect(server.ws, subprotocols=[Subprotocol(transport)], proxy=None) as socket:
            socket.recv()
            frame = codec.encode({"type": "generate", "gen": "g", **fields})
            socket.send(frame.decode() if codec.text else frame)
            while True:
                message = codec.server_message(socket.recv(60))
                if isinstance(message, m.Error):
                    assert message.gen == "g"
                    return message.code, message.param or "", message.message
                if isinstance(message, m.Finished):
                    break
    raise AssertionError(f"{fields} was served")


def from_status(error: grpc.RpcError) -> tuple[str, str, str]:
    """(code, field, message) out of a gRPC error's details."""
    status = rpc_status.from_call(error)
    assert status is not None
    code = field = ""
    for packed in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if packed.Unpack(info):
            assert info.domain == "specserve"
            code = info.reason.lower()
        elif packed.Unpack(bad):
            (violation,) = bad.field_violations
            field = violation.field
    return code, field, str(status.message)
