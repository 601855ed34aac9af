"""A real server with a tiny model: every way in by gRPC gives the same tokens, the gateway's too.

With an smg gateway on the PATH (pip install smg, in an environment of its own) two servers are
also asked through it; nothing else here needs it.
"""

from __future__ import annotations

import io
import json
import shutil
import socket
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2 as common  # noqa: E402
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm  # noqa: E402
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc  # noqa: E402

from spec_serve.api.proto import specserve_pb2 as pb  # noqa: E402
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc  # noqa: E402
from tests.api.processes import process  # noqa: E402
from tests.api.tokens import TinyTokens  # noqa: E402
from tests.engines import engine, tokens  # noqa: E402
from tests.servers import Server, start  # noqa: E402
from tests.tiny import write_tiny_model_dir  # noqa: E402

TOKENS = TinyTokens()
PROMPT = "the other the other"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log) as running:
        yield running
        running.wait_idle()
    assert "Traceback" not in log.read_text()


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


def by_call(channel: grpc.Channel, request: pb.GenerateRequest) -> list[int]:
    stub: Any = pb_grpc.SpecServeStub(channel)
    return [t for event in stub.Generate(request, timeout=60) for t in event.delta.token_ids]


def by_session(channel: grpc.Channel, request: pb.GenerateRequest) -> list[int]:
    stub: Any = pb_grpc.SpecServeStub(channel)
    asked = [
        pb.SessionRequest(generate=pb.SessionGenerate(gen=gen, request=request)) for gen in "abc"
    ]
    got: dict[str, list[int]] = {gen: [] for gen in "abc"}
    for event in stub.Session(iter(asked), timeout=60):
        assert not event.HasField("error"), event
        got[event.generation.gen or "a"] += event.generation.event.delta.token_ids
    assert got["a"] == got["b"] == got["c"]
    return got["a"]


@pytest.mark.parametrize("way", [by_call, by_session])
@pytest.mark.parametrize("mode", [pb.Speculation.OFF, pb.Speculation.MAX])
def test_calls_and_sessions_give_what_the_engine_gives(
    channel: grpc.Channel, way: Any, mode: pb.Speculation.Mode
) -> None:
    request = pb.GenerateRequest(
        prompt=PROMPT,
        stop=pb.Stop(max_tokens=24, ignore_eos=True),
        output=pb.Output(token_ids=True),
        speculation=pb.Speculation(mode=mode),
    )
    assert way(channel, request) == tokens(engine("none"), TOKENS.encode(PROMPT), 24)


@pytest.mark.parametrize("tokenized", [False, True])
def test_vllms_interface_gives_what_the_engine_gives(
    channel: grpc.Channel, tokenized: bool
) -> None:
    ids = TOKENS.encode(PROMPT)
    params = vllm.SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    request = vllm.GenerateRequest(sampling_params=params, stream=True)
    if tokenized:
        request.tokenized.input_ids.extend(ids)
    else:
        request.text = PROMPT
    *chunks, last = vllm_grpc.VllmEngineStub(channel).Generate(request, timeout=60)
    wanted = tokens(engine("none"), ids, 24)
    assert [t for chunk in chunks for t in chunk.chunk.token_ids] == wanted
    complete = last.complete
    assert list(complete.output_ids) == wanted and complete.finish_reason == "length"
    assert 0 < complete.spec_accepted_tokens <= complete.spec_draft_tokens
    scored = complete.input_logprobs
    assert list(scored.token_ids) == ids and not scored.token_logprobs[0].HasField("value")
    assert all(one.value <= 0 for one in scored.token_logprobs[1:])
    assert chunks[0].chunk.input_logprobs == scored
    assert not any(chunk.chunk.HasField("input_logprobs") for chunk in chunks[1:])


def test_the_tokenizer_that_is_handed_out_is_ours(channel: grpc.Channel) -> None:
    pieces = list(vllm_grpc.VllmEngineStub(channel).GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(piece.data for piece in pieces)
    assert [piece.sha256 for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].sha256 == sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        made = Tokenizer.from_str(opened.read("tokenizer.json").decode())
        settings = json.loads(opened.read("tokenizer_config.json"))
    for text in (PROMPT, "\u00e9\u6f22 \U0001f600", ""):
        assert made.encode(text, add_special_tokens=False).ids == TOKENS.encode(text)
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_flush_drops_what_is_cached(channel: grpc.Channel) -> None:
    stub = vllm_grpc.VllmEngineStub(channel)
    params = vllm.SamplingParams(max_tokens=4, ignore_eos=True)
    request = vllm.GenerateRequest(text=PROMPT * 2, sampling_params=params)

    def cached() -> int:
        (response,) = stub.Generate(request, timeout=60)
        return int(response.complete.cached_tokens)

    cached()
    assert cached() > 0
    assert stub.FlushCache(common.FlushCacheRequest()).success
    assert cached() == 0


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def fetched(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def gateway(policy: str, *servers: Server) -> Iterator[str]:
    """An smg gateway in front of these servers, once it knows their model and tokenizer."""
    port = free_port()
    command = ["smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", policy]
    url = f"http://127.0.0.1:{port}/v1"
    with process([*command, "--worker-urls", *(f"grpc://{one.grpc}" for one in servers)]):
        end = time.monotonic() + 60
        while True:
            try:
                if fetched(f"{url}/models")["data"]:
                    break
            except OSError:
                pass
            assert time.monotonic() < end, "the gateway has no model"
            time.sleep(0.5)
        time.sleep(2)  # it fetches the tokenizer in the background
        yield url


NEEDS_SMG = pytest.mark.skipif(shutil.which("smg") is None, reason="needs smg on the PATH")
ASKED = {"model": "tiny", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
@NEEDS_SMG
def test_a_gateway_in_front_of_two_servers(model: Path, tmp_path: Path) -> None:
    wanted = tokens(engine("none"), TOKENS.encode(PROMPT), 16)
    with start(model, tmp_path / "a.log") as one, start(model, tmp_path / "b.log") as two:
        with gateway("round_robin", one, two) as url:
            for _ in range(4):
                got = fetched(f"{url}/completions", {**ASKED, "prompt": PROMPT})
                # It leaves out a character that the limit cut in two.
                text = got["choices"][0]["text"]
                assert text.rstrip("\ufffd") == TOKENS.decode(wanted).rstrip("\ufffd")
                assert got["usage"]["completion_tokens"] == 16
        assert one.stats().requests == two.stats().requests == 2


@pytest.mark.slow
@NEEDS_SMG
def test_a_gateway_sends_prompts_to_where_they_are_cached(model: Path, tmp_path: Path) -> None:
    """It learns of it from the events of SubscribeKvEvents."""
    events = ("--kv-events", "grpc")
    with (
        start(model, tmp_path / "a.log", *events) as one,
        start(model, tmp_path / "b.log", *events) as two,
        gateway("cache_aware", one, two) as url,
    ):
        for turn in range(4):
            for prefix in ("the other " * 5, "in the end " * 5):
                body = {**ASKED, "prompt": prefix + "x" * turn}
                usage = fetched(f"{url}/completions", body)["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= usage["prompt_tokens"] - 2 if turn else not cached
        assert one.stats().requests == two.stats().requests == 4
