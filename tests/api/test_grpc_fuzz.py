"""Bytes nobody should send, to every gRPC method: never our failure, and nobody else notices.

Over a socket with hypothesis, against a server process; and tens of thousands in this process,
through the decoders and all checks up to the engine's.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_serve.api import grpc_convert, grpc_session
from spec_serve.api import messages as m
from spec_serve.api.convert import to_request
from spec_serve.api.grpc_server import SERVICES, vllm_grpc
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.spec.request import RequestError
from tests.api.echo import ByteTokens, Echo
from tests.api.processes import Running, echo_server

NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
STEADY = "nobody notices; " * 100

RICH = pb.GenerateRequest(
    request_id="id",
    model="echo",
    chat=pb.Chat(
        messages=[pb.Message(role="user", content="hi", tool_calls_json='[{"a": 1}]')],
        tools_json="[]",
    ),
    sampling=pb.Sampling(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, seed=7, n=2, logit_bias={1: 2.0, 300: -5.0},
    ),
    stop=pb.Stop(max_tokens=5, min_tokens=1, strings=["\n\n"], token_ids=[3], bad_words=["x"]),
    output=pb.Output(token_ids=True, logprobs=2, prompt_logprobs=1, spec_detail=1),
    speculation=pb.Speculation(mode=2, max_nodes=3, sources=["lookup"], prediction="hi"),
    priority=-3,
    cache_salt="salt",
)  # fmt: skip
PLAIN = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[104, 105]), stop=pb.Stop(max_tokens=9))
SESSION = [
    pb.SessionRequest(generate=pb.SessionGenerate(gen="g", request=PLAIN, timeout_s=3.0)),
    pb.SessionRequest(generate=pb.SessionGenerate(gen="h", request=RICH, resumable=True)),
    pb.SessionRequest(cancel=pb.SessionCancel(gen="g")),
    pb.SessionRequest(ping=pb.SessionPing(t=1.0)),
    pb.SessionRequest(ack=pb.SessionAck(gen="g", seq=3)),
    pb.SessionRequest(resume=pb.SessionResume(resume_token="t" * 22, gens={"g": 1})),
]
VLLM: list[Any] = []
if vllm_grpc is not None:
    vllm = vllm_grpc.vllm
    params = vllm.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, max_tokens=9, min_tokens=1, stop=["a"], n=2,
        stop_token_ids=[4], logprobs=3, prompt_logprobs=2, seed=3, logit_bias={5: 1.5},
    )  # fmt: skip
    ids = vllm.TokenizedInput(input_ids=[104, 105])
    VLLM.append(
        vllm.GenerateRequest(request_id="x", tokenized=ids, sampling_params=params, stream=True)
    )
SEEDS: dict[str, list[Message]] = {
    "specserve.v1.SpecServe.Generate": [RICH, PLAIN],
    "Session": SESSION,
    "specserve.v1.SpecServe.Abort": [pb.AbortRequest(request_ids=["a", "b"])],
    "specserve.v1.SpecServe.Tokenize": [
        pb.TokenizeRequest(prompt="hi"),
        pb.TokenizeRequest(detokenize=pb.TokenIds(ids=[1, 2])),
    ],
    "vllm.grpc.engine.VllmEngine.Generate": VLLM,
    "specserve.v1.SpecServe.WatchStats": [pb.WatchStatsRequest(interval_ms=500)],
}


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        else:
            out[at:at] = out[at : at + rng.randint(1, 16)]
    return bytes(out)


@st.composite
def odd_bytes(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    kind = draw(st.sampled_from(["random", "mutated", "cut"]))
    if kind == "random" or not seeds:
        return draw(st.binary(max_size=200))
    data = draw(st.sampled_from(seeds))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    return mutated(data, random.Random(draw(st.integers(0, 2**32))))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with echo_server({"run": 3, "pause": 0.001}) as running:
        yield running
        running.process.send_signal(signal.SIGTERM)
        code, said = running.ended()
        assert code == 0 and "Traceback" not in said and "Unexpected" not in said, said


@pytest.fixture(scope="module")
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


def tried(channel: grpc.Channel, method: Any, data: list[bytes]) -> grpc.StatusCode:
    """The status of a call with these bytes, or OK where it went on for some answers."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            call = channel.stream_stream(path)(iter(data), timeout=10)
        elif method.server_streaming:
            call = channel.unary_stream(path)(data[0], timeout=10)
        else:
            channel.unary_unary(path)(data[0], timeout=10)
            return grpc.StatusCode.OK
        for _ in zip(range(1 if method.name == "WatchStats" else 4), call, strict=False):
            pass
        call.cancel()
    except grpc.RpcError as error:
        assert "Traceback" not in error.details() and "0x" not in error.details()
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


METHODS = [method for service in SERVICES for method in service.methods]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
def test_no_bytes_are_our_failure(channel: grpc.Channel, method: Any) -> None:
    if method.name == "Watch":
        pytest.skip("grpc's own, and it lasts")
    seeds = [one.SerializeToString() for one in SEEDS.get(method.full_name, [])]
    stub: Any = pb_grpc.SpecServeStub(channel)
    steady = stub.Generate(pb.GenerateRequest(prompt=STEADY), timeout=60)
    count = 120 if method.name in ("Generate", "Session") else 30

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(odd_bytes(seeds), min_size=1, max_size=6 if method.client_streaming else 1))
    def fuzz(data: list[bytes]) -> None:
        assert tried(channel, method, data) not in NEVER

    fuzz()
    assert "".join(event.delta.text for event in steady) == STEADY


def test_a_message_too_large_is_refused(channel: grpc.Channel) -> None:
    generate = channel.unary_stream("/specserve.v1.SpecServe/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(generate(bytes(9 << 20), timeout=60))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    stub: Any = pb_grpc.SpecServeStub(channel)
    assert list(stub.Generate(pb.GenerateRequest(prompt="still here"), timeout=60))


def test_fifty_thousand_messages_through_all_checks() -> None:
    """What the decoder lets through is served or refused by name."""
    rng, tokens, engine = random.Random(4), ByteTokens(), Echo()
    seeds = [one.SerializeToString() for one in (RICH, PLAIN)]
    served = refused = garbage = 0
    for turn in range(50_000):
        data = mutated(seeds[turn % 2], rng)
        try:
            engine.validate(to_request(grpc_convert.generate(_read(data)), tokens).request)
            served += 1
        except DecodeError:
            garbage += 1
        except (m.BadMessage, RequestError) as error:
            refused += 1
            assert error.args[0]
    assert min(served, refused, garbage) > 500, (served, refused, garbage)


def _read(data: bytes) -> pb.GenerateRequest:
    return pb.GenerateRequest.FromString(data)


def test_fifty_thousand_session_messages() -> None:
    rng = random.Random(5)
    seeds = [one.SerializeToString() for one in SESSION]
    made = refused = 0
    for turn in range(50_000):
        try:
            message = pb.SessionRequest.FromString(mutated(seeds[turn % len(seeds)], rng))
        except DecodeError:
            continue
        try:
            grpc_session.client_message(message)
            made += 1
        except m.BadMessage as error:
            refused += 1
            assert str(error)
    assert min(made, refused) > 500, (made, refused)


@pytest.mark.skipif(vllm_grpc is None, reason="needs smg-grpc-proto")
def test_fifty_thousand_of_vllms_messages() -> None:
    (one,) = VLLM
    seed = one.SerializeToString()
    rng, tokens, engine = random.Random(6), ByteTokens(), Echo()
    served = refused = 0
    for _ in range(50_000):
        try:
            message = type(one).FromString(mutated(seed, rng))
        except DecodeError:
            continue
        try:
            engine.validate(to_request(vllm_grpc.to_generate(message), tokens).request)
            served += 1
        except (m.BadMessage, RequestError) as error:
            refused += 1
            assert str(error)
    assert min(served, refused) > 500, (served, refused)


FLOATS = [0.0, -1.0, 1e-45, 2.0**31, 2.0**63, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "a" * (1 << 20), "\x00\x1b[2J\u202e", "<eos><|im_start|>", "\U0001f600" * 300]


def values(field: Any) -> list[Any]:
    """What to try a field with; [] for messages."""
    kind = field.cpp_type
    if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return FLOATS
    if kind == field.CPPTYPE_ENUM:
        return [*(one.number for one in field.enum_type.values), 99, 2**31 - 1]
    if kind == field.CPPTYPE_STRING:
        binary = field.type == field.TYPE_BYTES
        return [text.encode() for text in TEXTS] if binary else TEXTS
    bounds = {
        field.CPPTYPE_INT32: [0, 1, -1, -(2**31), 2**31 - 1],
        field.CPPTYPE_UINT32: [0, 1, 2**31, 2**32 - 1],
        field.CPPTYPE_INT64: [0, -1, -(2**63), 2**63 - 1],
        field.CPPTYPE_UINT64: [0, 1, 2**31, 2**63, 2**64 - 1],
        field.CPPTYPE_BOOL: [False, True],
    }
    return bounds.get(kind, [])


def odd_ones(make: type[Message], depth: int = 4) -> Iterator[Message]:
    """Messages with one field, at any depth, set to something odd."""
    for field in make.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is None:
            for value in values(field):
                made = make()
                if field.is_repeated:
                    getattr(made, field.name).extend([value] * 3)
                else:
                    setattr(made, field.name, value)
                yield made
        elif inner.GetOptions().map_entry:
            keys, kept = (values(inner.fields_by_name[name]) for name in ("key", "value"))
            for key in keys:
                for value in kept:
                    made = make()
                    if inner.fields_by_name["value"].message_type is None:
                        getattr(made, field.name)[key] = value
                    yield made
        elif depth:
            for part in odd_ones(inner._concrete_class, depth - 1):
                made = make()
                if field.is_repeated:
                    getattr(made, field.name).extend([part] * 2)
                else:
                    getattr(made, field.name).CopyFrom(part)
                yield made


@pytest.mark.parametrize("proto", ["ours", "theirs"])
def test_every_field_with_every_odd_value(proto: str) -> None:
    """Served or refused by name, and what is served stays within the bounds."""
    if proto == "theirs" and vllm_grpc is None:
        pytest.skip("needs smg-grpc-proto")
    make = pb.GenerateRequest if proto == "ours" else vllm_grpc.vllm.GenerateRequest
    convert = grpc_convert.generate if proto == "ours" else vllm_grpc.to_generate
    tokens, engine = ByteTokens(), Echo()
    served = refused = 0
    for odd in odd_ones(make):
        whole: Any = make()
        if proto == "ours":
            whole.prompt = "hi"
        else:
            whole.text = "hi"
        whole.MergeFrom(odd)
        try:
            wire = convert(whole)
            engine.validate(to_request(wire, tokens).request)
        except (m.BadMessage, RequestError) as error:
            refused += 1
            assert getattr(error, "field", ""), (odd, error)
            continue
        served += 1
        sampling = wire.sampling
        assert 1 <= sampling.n <= 8 and 0 <= (sampling.temperature or 0) <= 2
        assert wire.max_tokens is None or wire.max_tokens >= 1
    assert served > 30 and refused > 60, (served, refused)
