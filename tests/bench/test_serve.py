"""`bench serve` against a server process with the echoing engine, over all transports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_serve.bench import serve
from spec_serve.bench.serve_ask import Clock, HttpAsker, Outcome, Wanted, asked
from spec_serve.bench.serve_data import Question
from tests.api.processes import Running, echo_server

KINDS = ("http", "ws", "grpc")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with echo_server({"run": 3, "pause": 0.001, "rows": 16}) as running:
        yield running


def url(server: Running, kind: str) -> str:
    return {
        "http": server.health.removesuffix("/health"), "ws": server.ws,
        "grpc": f"grpc://{server.grpc}",
    }[kind]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [
        {"category": "raw", "prompt": "hello you"},
        {"category": "chat", "messages": [{"role": "user", "content": "hello you"}]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_loop(
    server: Running, kind: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--url", url(server, kind), "--rate", "40", "--seconds", "1", "--data", data,
            "--json", str(tmp_path / "j"), "--html", str(tmp_path / "h"), "--arrival", "bursts",
            "--burst", "4", "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000"]  # fmt: skip
    assert serve.main(argv) == 0
    (made,) = json.loads((tmp_path / "j").read_text())["loads"]
    assert made["rate"] == 40 and made["errors"] == {} and made["good_share"] == 1
    assert made["requests"] == made["answered"] == len(made["outcomes"]) > 15
    for one in made["outcomes"]:
        assert (one["tokens"], one["prompt_tokens"]) == (10, 9)
        assert [tokens for _, tokens in one["arrivals"]] == [3, 3, 3, 1]
        assert (one["steps"], one["drafted"], one["accepted"]) == (4, 10, 6)
        times = [at for at, _ in one["arrivals"]]
        assert one["due"] <= one["sent"] < times[0] and times == sorted(times)
        assert times[-1] <= one["ended"]
    assert made["tokens_per_step"] == 2.5 and made["acceptance"] == 0.6
    assert made["ttft_ms"]["p50"] > 0 and made["itl_ms"]["p50"] > 0
    assert {one["category"] for one in made["outcomes"]} == {"raw", "chat"}
    out = capsys.readouterr().out
    assert "40 requests/s, bursts" in out and "to the first token" in out and "raw" in out
    assert (tmp_path / "h").read_text().count("<svg") == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_loop(server: Running, kind: str, tmp_path: Path) -> None:
    argv = ["--url", url(server, kind), "--concurrency", "3", "--requests", "20", "--raw",
            "--max-tokens", "12", "--ignore-eos", "--json", str(tmp_path / "j")]  # fmt: skip
    assert serve.main(argv) == 0
    (made,) = json.loads((tmp_path / "j").read_text())["loads"]
    assert made["requests"] == made["answered"] == 20 and made["rate"] is None
    assert made["most_at_once"] == 3
    assert made["completion_tokens"] == 240


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_counted_by_code(server: Running, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 5000}) + "\n")
    argv = ["--url", url(server, kind), "--concurrency", "1", "--requests", "3", "--data",
            str(path), "--json", str(tmp_path / "j")]  # fmt: skip
    assert serve.main(argv) == 1
    (made,) = json.loads((tmp_path / "j").read_text())["loads"]
    assert made["errors"] == {"context_length_exceeded": 3} and made["answered"] == 0


def test_a_sweep_finds_the_saturating_load(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--url", url(server, "ws"), "--sweep", "10,20", "--seconds", "0.6", "--max-tokens", "6",
            "--json", str(tmp_path / "j"), "--slo-ttft-ms", "60000"]  # fmt: skip
    assert serve.main(argv) == 0
    made = json.loads((tmp_path / "j").read_text())
    rates = [load["rate"] for load in made["loads"]]
    assert rates[:2] == [10, 20] and len(rates) == 3
    best = max(load["goodput_per_s"] for load in made["loads"][:2])
    assert rates[2] == pytest.approx(2 * best)
    assert "saturating load" in made["found"] in capsys.readouterr().out


def test_an_automatic_sweep_ends(tmp_path: Path) -> None:
    with echo_server({"run": 1, "pause": 0.02, "rows": 1}) as slow:
        argv = ["--url", slow.ws, "--sweep", "--rate", "8", "--seconds", "0.5", "--max-tokens", "8",
                "--slo-ttft-ms", "500", "--json", str(tmp_path / "j")]  # fmt: skip
        serve.main(argv)
    rates = [load["rate"] for load in json.loads((tmp_path / "j").read_text())["loads"]]
    assert rates[0] == 8 and 2 < len(rates) < 6


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_there_is_said(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = {"http": "http://127.0.0.1:9", "ws": "ws://127.0.0.1:9", "grpc": "grpc://127.0.0.1:9"}
    assert serve.main(["--url", where[kind], "--rate", "1"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_another_server_is_said(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--url", url(server, "http"), "--rate", "1", "--model", "none"]) == 1
    assert "'none' is not served there; echo is" in capsys.readouterr().err
    assert serve.main(["--url", f"{url(server, 'http')}/nothing", "--rate", "1"]) == 1
    assert "/nothing/v1/models: 404" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--url", "localhost:8000", "--rate", "1"], "--url"),
        (["--url", "ws://h"], "how much load"),
        (["--url", "ws://h", "--rate", "-1"], "--rate"),
        (["--url", "ws://h", "--rate", "nan"], "--rate"),
        (["--url", "ws://h", "--rate", "1", "--seconds", "0"], "--seconds"),
        (["--url", "ws://h", "--concurrency", "-1"], "--concurrency"),
        (["--url", "ws://h", "--sweep", "1,x"], "--sweep"),
        (["--url", "ws://h", "--rate", "1", "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_wrong_usage(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_leaving_and_lateness_are_noted(server: Running) -> None:
    async def go() -> None:
        asker = HttpAsker(url(server, "http"), Wanted(ignore_eos=True), None, None)
        await asker.open()
        question, clock = Question("c", prompt="abc"), Clock()
        left = await asked(asker, question, Outcome(0, "c"), clock, Wanted(), 3)
        assert left.left and not left.code and len(left.arrivals) == 3 and not left.fine
        late = Wanted(timeout_s=0.02)
        slow = await asked(asker, question, Outcome(1, "c"), clock, late)
        assert slow.code == "no_answer" and not slow.fine
        await asker.close()

    asyncio.run(go())
