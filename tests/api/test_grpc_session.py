"""Many generations over one gRPC call, and what becomes of them when the call breaks."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from spec_serve.api import messages as m
from spec_serve.api.grpc_session import MAX_BAD, client_message, server_event
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from tests.api.processes import Running, echo_server


class Talk:
    """A session of a client: `say` requests, `hear` events."""

    def __init__(self, stub: Any, **options: Any) -> None:
        self._said: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self.call = stub.Session(iter(self._said.get, None), timeout=60, **options)
        self.hello = next(self.call).hello

    def say(self, **said: Any) -> None:
        self._said.put(pb.SessionRequest(**said))

    def begin(self, gen: str, resumable: bool = False, **request: Any) -> None:
        asked = pb.GenerateRequest(**request)
        self.say(generate=pb.SessionGenerate(gen=gen, request=asked, resumable=resumable))

    def end(self) -> None:
        self._said.put(None)

    def hear(self) -> Any:
        return next(self.call)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = {"run": 2, "pause": 0.002, "context": 1 << 16}
    with echo_server(engine, resume_window_s=4.0) as running:
        yield running


@pytest.fixture
def stub(server: Running) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield pb_grpc.SpecServeStub(channel)


def gather(events: list[Any]) -> dict[str, tuple[str, list[int]]]:
    """Per generation its text and the numbers of its events."""
    made: dict[str, tuple[str, list[int]]] = {}
    for event in events:
        if event.HasField("generation"):
            gen, inner = event.generation.gen, event.generation.event
            text, seqs = made.get(gen, ("", []))
            made[gen] = (text + inner.delta.text, [*seqs, inner.seq])
    return made


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_many_at_once_and_what_runs_is_finished_after_the_clients_end(stub: Any) -> None:
    talk = Talk(stub)
    assert talk.hello.models == ["echo"] and talk.hello.resume_token
    texts = {f"g{i}": f"text number {i} " * (5 + i) for i in range(4)}
    for gen, text in texts.items():
        talk.begin(gen, prompt=text)
    talk.say(ping=pb.SessionPing(t=1.5))
    talk.end()
    events = list(talk.call)
    heard = gather(events)
    assert {gen: text for gen, (text, _) in heard.items()} == texts
    for _, seqs in heard.values():
        assert seqs == list(range(len(seqs)))
    (pong,) = [event.pong for event in events if event.HasField("pong")]
    assert pong.t == 1.5 and abs(pong.server_t - time.time()) < 60


def test_what_is_wrong_is_told_in_band_and_disturbs_nobody(stub: Any) -> None:
    talk = Talk(stub)
    talk.begin("steady", prompt="steady " * 60)
    talk.begin("hot", prompt="a", sampling=pb.Sampling(temperature=9))
    talk.begin("steady", prompt="again")
    talk.begin("bad name", prompt="a")
    talk.begin("named", prompt="a", request_id="mine")
    talk.begin("ids", token_ids=pb.TokenIds(ids=[999]))
    talk.say()
    talk.say(ping=pb.SessionPing(t=float("nan")))
    talk.say(resume=pb.SessionResume(resume_token="nobody's", gens={"x": 3}))
    talk.say(resume=pb.SessionResume(resume_token="nobody's", gens={"x": -2}))
    talk.end()
    events = list(talk.call)
    assert gather(events)["steady"][0] == "steady " * 60
    told = [(e.error.code, e.error.gen, e.error.param) for e in events if e.HasField("error")]
    assert sorted(told) == sorted(
        [
            ("invalid_request", "hot", "sampling.temperature"),
            ("duplicate_id", "", "gen"),
            ("invalid_request", "bad name", "gen"),
            ("invalid_request", "named", "request.request_id"),
            ("invalid_request", "ids", "token_ids.ids"),
            ("invalid_request", "", "say"),
            ("invalid_request", "", "t"),
            ("resume_gap", "x", "gens"),
            ("invalid_request", "", "gens"),
        ]
    )


def test_cancel(stub: Any) -> None:
    talk = Talk(stub)
    talk.begin("long", prompt="a", stop=pb.Stop(ignore_eos=True))
    while not talk.hear().generation.event.HasField("delta"):
        pass
    talk.say(cancel=pb.SessionCancel(gen="long"))
    talk.say(cancel=pb.SessionCancel(gen="nobody"))
    talk.end()
    last = list(talk.call)[-1].generation.event.finished
    assert last.reason == pb.Finished.CANCELLED and last.last


def test_a_broken_call_is_resumed_without_a_gap(stub: Any) -> None:
    text = "to be continued; " * 12
    first = Talk(stub)
    first.begin("g", resumable=True, prompt=text)
    first.begin("gone", prompt="a", stop=pb.Stop(ignore_eos=True))
    events = [first.hear() for _ in range(12)]
    heard = gather(events)
    seen = heard["g"][1][-1]
    first.say(ack=pb.SessionAck(gen="g", seq=seen))
    first.call.cancel()
    second = Talk(stub)
    asked = pb.SessionResume(resume_token=first.hello.resume_token, gens={"g": seen, "gone": 1})
    second.say(resume=asked)
    second.end()
    rest = list(second.call)
    assert [list(event.resumed.gens) for event in rest if event.HasField("resumed")] == [["g"]]
    (error,) = [event.error for event in rest if event.HasField("error")]
    assert (error.code, error.gen) == ("resume_gap", "gone")
    more = gather(rest)["g"]
    assert heard["g"][0] + more[0] == text
    assert more[1] == list(range(seen + 1, seen + 1 + len(more[1])))


def test_what_is_not_resumable_or_not_resumed_ends_in_the_engine(stub: Any) -> None:
    def stats() -> Any:
        return stub.GetServerInfo(pb.GetServerInfoRequest()).stats

    until(lambda: not (stats().running or stats().waiting))
    before = stats()
    talk = Talk(stub)
    talk.begin("plain", prompt="a", stop=pb.Stop(ignore_eos=True))
    talk.begin("kept", True, prompt="a", stop=pb.Stop(ignore_eos=True))
    until(lambda: stats().requests == before.requests + 2)
    talk.call.cancel()
    until(lambda: stats().aborted >= before.aborted + 1)
    until(lambda: stats().aborted == before.aborted + 2)  # after the window


def test_a_session_taken_over_while_it_stands_is_ended(stub: Any) -> None:
    first = Talk(stub)
    first.begin("g", True, prompt="b" * 200)
    while not first.hear().generation.event.HasField("delta"):
        pass
    second = Talk(stub)
    second.say(
        resume=pb.SessionResume(resume_token=first.hello.resume_token, gens={"g": -1})
    )
    second.end()
    assert gather(list(second.call))["g"][0] == "b" * 200
    with pytest.raises(grpc.RpcError) as caught:
        list(first.call)
    assert caught.value.code() == grpc.StatusCode.ABORTED


def test_garbage_ends_the_call_and_too_much_nonsense_too(
    stub: Any, server: Running
) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream("/specserve.v1.SpecServe/Session")(iter([b"\xff\xff"]))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    talk = Talk(stub)
    for _ in range(MAX_BAD + 5):
        talk.say()
    with pytest.raises(grpc.RpcError) as caught:
        list(talk.call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert stub.ListModels(pb.ListModelsRequest()).models


def test_a_drain_finishes_what_runs_and_ends_the_session() -> None:
    with echo_server({"run": 1, "pause": 0.004}) as running:
        with grpc.insecure_channel(running.grpc) as channel:
            talk = Talk(pb_grpc.SpecServeStub(channel))
            talk.begin("g", prompt="d" * 100)
            while not talk.hear().generation.event.HasField("delta"):
                pass
            running.process.send_signal(signal.SIGTERM)
            events = []
            with pytest.raises(grpc.RpcError) as caught:
                while True:
                    events.append(talk.hear())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert any(event.HasField("draining") for event in events)
            # If that was quick the generation's end came before the news of the drain.
            (end,) = [e for e in events if e.generation.event.HasField("finished")]
            assert end.generation.event.finished.last
        assert running.ended() == (0, "")


def test_every_message_has_its_form() -> None:
    assert client_message(pb.SessionRequest(ack=pb.SessionAck(gen="g", seq=4))) == m.Ack("g", 4)
    with pytest.raises(m.BadMessage, match="resume_token"):
        client_message(pb.SessionRequest(resume=pb.SessionResume()))
    with pytest.raises(m.BadMessage, match="seq"):
        client_message(pb.SessionRequest(ack=pb.SessionAck(gen="g", seq=2**64 - 1)))
    made = server_event(m.Draining(30.0))
    assert made.draining.deadline_s == 30.0
    lost = m.Error("overloaded", "full", gen="g", seq=7, retryable=True, retry_after_ms=900)
    error = server_event(lost).error
    assert (error.gen, error.seq, error.retry_after_ms) == ("g", 7, 900)
    assert not server_event(m.Error("timeout", "late")).error.HasField("gen")
