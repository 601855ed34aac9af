"""The gRPC bench runs, its reader reads what a real client reads, and its fakes keep time."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.bench import rpc
from spec_serve.bench.faked import WRAP, age_us
from spec_serve.bench.http2 import Call


def test_it_measures_both_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rpc.json"
    flags = ["--streams", "3", "--messages", "10", "--tick-ms", "5", "--json", str(out)]
    assert rpc.main(flags) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["server"] for row in rows] == ["bare", "server"]
    for row in rows:
        assert row["cpu us/msg"] > 0 and 0 < row["p50"] <= row["p90"] < 5_000_000
    assert "cpu us/msg" in capsys.readouterr().out


def test_the_plain_reader_hears_what_a_client_hears() -> None:
    asked = rpc.request(6, 2)
    with rpc.Child("server", 5.0, 2) as child:
        call = Call(child.address, rpc.PATH, asked.SerializeToString())
        plain = [pb.GenerateEvent.FromString(data) for data in call.messages()]
        call.close()
        with grpc.insecure_channel(child.address) as channel:
            stub = pb_grpc.SpecServeStub(channel)  # type: ignore[no-untyped-call]
            usual = list(stub.Generate(asked, timeout=60))
        refused = Call(child.address, rpc.PATH, b"\xff\xff")
        assert list(refused.messages()) == []
        refused.close()
    for events in (plain, usual):
        assert [event.seq for event in events] == list(range(8))
        assert sum(len(event.delta.token_ids) for event in events) == 12
        assert events[-1].finished.last


def test_stamps_survive_their_wrap() -> None:
    assert age_us(WRAP - 5, 10) == 15 and age_us(10, 25) == 15
