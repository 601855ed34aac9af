"""vLLM's gRPC interface, as a gateway's side sees it: a server process with the echoing engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2 as common  # noqa: E402
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm  # noqa: E402
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc  # noqa: E402

from spec_serve.api.vllm_grpc import archive  # noqa: E402
from tests.api.processes import Running, echo_server  # noqa: E402

TEXT = "a gateway's question, with an \u00e9 and \u6f22"
Params = vllm.SamplingParams


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    # Long: what is to be cancelled is not over before.
    with echo_server({"run": 3, "pause": 0.001, "context": 1 << 16}) as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return vllm_grpc.VllmEngineStub(channel)


def ask(text: str = TEXT, stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(text=text, stream=stream, sampling_params=Params(**params))


def load(stub: Any) -> Any:
    (found,) = stub.GetLoads(vllm.GetLoadsRequest()).loads
    return found


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def split(responses: list[Any]) -> tuple[list[Any], list[Any]]:
    chunks = [r.chunk for r in responses if r.WhichOneof("response") == "chunk"]
    whole = [r.complete for r in responses if r.WhichOneof("response") == "complete"]
    assert len(chunks) + len(whole) == len(responses)
    return chunks, whole


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_stream_of_chunks_and_the_whole(stub: Any, tokenized: bool) -> None:
    data = list(TEXT.encode())
    request = ask(logprobs=2)
    if tokenized:
        request.tokenized.original_text = "is not read"
        request.tokenized.input_ids.extend(data)
    chunks, (complete,) = split(list(stub.Generate(request, timeout=60)))
    wanted = [*data, 256]
    assert [t for chunk in chunks for t in chunk.token_ids] == wanted
    counts = [chunk.completion_tokens for chunk in chunks]
    assert counts == sorted(set(counts)) and counts[-1] == len(wanted)
    assert {chunk.prompt_tokens for chunk in chunks} == {len(data)}
    assert [t for chunk in chunks for t in chunk.output_logprobs.token_ids] == wanted
    assert list(complete.output_ids) == wanted == list(complete.output_logprobs.token_ids)
    assert len(complete.output_logprobs.top_logprobs[0].values) == 2
    assert complete.finish_reason == "stop" and not complete.WhichOneof("matched_stop")
    assert (complete.prompt_tokens, complete.completion_tokens) == (len(data), len(wanted))
    steps = len(chunks)
    assert complete.spec_accepted_tokens == len(wanted) - steps
    assert complete.spec_draft_tokens == len(wanted)


def test_chunks_without_logprobs_do_not_remember_the_one_before(stub: Any) -> None:
    chunks, _ = split(list(stub.Generate(ask("abcdefgh", max_tokens=8), timeout=60)))
    assert [list(chunk.token_ids) for chunk in chunks] == [
        list(b"abc"), list(b"def"), list(b"gh"),
    ]  # fmt: skip


def test_unstreamed_choices_come_whole(stub: Any) -> None:
    request = ask("xyz", stream=False, n=3, stop=["yz"], include_stop_str_in_output=True)
    chunks, whole = split(list(stub.Generate(request, timeout=60)))
    assert not chunks and sorted(one.index for one in whole) == [0, 1, 2]
    for one in whole:
        assert (one.finish_reason, one.matched_stop_str) == ("stop", "yz")
        assert bytes(one.output_ids) == b"xyz"
    (one,) = split(list(stub.Generate(ask("xyz", max_tokens=2), timeout=60)))[1]
    assert one.finish_reason == "length" and bytes(one.output_ids) == b"xy"


BAD: list[tuple[vllm.GenerateRequest, str]] = [
    (vllm.GenerateRequest(), "text"),
    (vllm.GenerateRequest(text=""), "text"),
    (vllm.GenerateRequest(tokenized=vllm.TokenizedInput()), "tokenized.input_ids"),
    (vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[257])), "tokenized.input_ids"),
    (ask(json_schema="{}"), "sampling_params.json_schema"),
    (ask(regex="a"), "sampling_params.regex"),
    (ask(grammar="root ::= x"), "sampling_params.grammar"),
    (ask(structural_tag="x"), "sampling_params.structural_tag"),
    (ask(json_object=True), "sampling_params.json_object"),
    (ask(choice=vllm.ChoiceConstraint(choices=["a"])), "sampling_params.choice"),
    (ask(n=9), "sampling_params.n"),
    (ask(n=2**32 - 1), "sampling_params.n"),
    (ask(temperature=float("nan")), "sampling_params.temperature"),
    (ask(temperature=-1), "sampling_params.temperature"),
    (ask(top_p=2), "sampling_params.top_p"),
    (ask(min_p=float("inf")), "sampling_params.min_p"),
    (ask(seed=-1), "sampling_params.seed"),
    (ask(logprobs=-1), "sampling_params.logprobs"),
    (ask(prompt_logprobs=21), "sampling_params.prompt_logprobs"),
    (ask(max_tokens=0), "sampling_params.max_tokens"),
    (ask(stop=["a"] * 17), "sampling_params.stop"),
    (ask(stop=[""]), "sampling_params.stop[0]"),
    (ask(stop_token_ids=[999]), "sampling_params.stop_token_ids"),
    (ask(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
    (ask(logit_bias={1: float("nan")}), "sampling_params.logit_bias"),
    (ask(truncate_prompt_tokens=5), "sampling_params.truncate_prompt_tokens"),
    (vllm.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank"),
    (vllm.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
    (vllm.GenerateRequest(text="a", mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
    (vllm.GenerateRequest(text="a", media_refs=vllm.MediaRefs()), "media_refs"),
    (vllm.GenerateRequest(text="a", request_id="r" * 129), "request_id"),
]


def test_what_is_wrong_or_not_served_is_named(stub: Any) -> None:
    steady = stub.Generate(ask("steady " * 100))
    next(steady)
    for request, field in BAD:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=60))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (request, caught.value)
        (detail,) = [
            detail for detail in rpc_status.from_call(caught.value).details
            if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
        ]  # fmt: skip
        told = error_details_pb2.BadRequest()
        detail.Unpack(told)
        assert told.field_violations[0].field == field
        assert caught.value.details().startswith(field)
    _, (complete,) = split(list(steady))
    assert bytes(complete.output_ids[:-1]) == b"steady " * 100


def test_abort_by_id_and_by_cancelling(stub: Any) -> None:
    def asked(name: str) -> vllm.GenerateRequest:
        request = ask("a", ignore_eos=True)
        request.request_id = name
        return request

    call = stub.Generate(asked("victim"))
    next(call)
    stub.Abort(vllm.AbortRequest(request_ids=["nobody", "victim"]))
    _, (complete,) = split(list(call))
    assert complete.finish_reason == "abort"
    call = stub.Generate(asked("again"))
    next(call)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(asked("again"), timeout=60))
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert load(stub).num_running_reqs == 1 and stub.GetServerInfo(
        vllm.GetServerInfoRequest()
    ).active_requests == 1
    call.cancel()
    until(lambda: not load(stub).num_total_reqs)


def test_what_gateways_ask_before_they_route(stub: Any, channel: grpc.Channel) -> None:
    health = stub.HealthCheck(vllm.HealthCheckRequest())
    assert health.healthy
    model = stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.is_generation) == ("echo", 257, True)
    assert list(model.eos_token_ids) == [256] and model.max_context_length == 65536
    server = stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.server_type, server.max_num_seqs) == ("vllm-grpc", 4)
    assert load(stub).max_running_requests == 4
    assert not stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)).loads
    name = "vllm.grpc.engine.VllmEngine"
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
    (found,) = mirror.ServerReflectionInfo(iter([asked]))
    assert found.file_descriptor_response.file_descriptor_proto
    flushed = stub.FlushCache(common.FlushCacheRequest())
    assert flushed.success and "tokens" in flushed.message


def test_what_is_not_there_says_so(stub: Any) -> None:
    calls = [
        lambda: stub.Embed(vllm.EmbedRequest()),
        lambda: stub.StartProfile(common.StartProfileRequest()),
        lambda: stub.StopProfile(common.StopProfileRequest()),
        lambda: list(stub.GetTokenizer(common.GetTokenizerRequest())),
        lambda: list(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details()


def test_an_archive_holds_the_files_and_is_always_the_same() -> None:
    files = {"b.json": json.dumps({"a": 1}).encode(), "a.json": b"[]"}
    data = archive(files)
    assert sha256(data).digest() == sha256(archive(dict(reversed(files.items())))).digest()
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        assert {name: opened.read(name) for name in opened.namelist()} == files


OTHER_PROTOBUF = """
from google.protobuf import runtime_version as checks
def check(*version, last=checks.ValidateProtobufRuntimeVersion):
    if version[-1] == "vllm_engine.proto":
        raise checks.VersionError("made for another protobuf")
    last(*version)
checks.ValidateProtobufRuntimeVersion = check
"""


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        ("import sys; sys.modules['smg_grpc_proto'] = None", "False False"),
        (OTHER_PROTOBUF, "False True"),
        ("", "True False"),
    ],
)
def test_a_server_goes_without_the_package(breaks: str, told: str) -> None:
    """Missing, or made for another protobuf: our own interface stands."""
    code = f"""{breaks}
from spec_serve.api import grpc_server as server
names = [one.full_name for one in server.SERVICES]
assert "specserve.v1.SpecServe" in names
print("vllm.grpc.engine.VllmEngine" in names, bool(server._WHY_NOT))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == told, done.stderr
