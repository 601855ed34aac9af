"""`spec-serve chat --connect` with a server process around the echoing engine."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_serve.api import cli, cli_chat, cli_connect
from tests.api.processes import Running, echo_server

KEY = "a-long-enough-key-for-tests-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with echo_server({"run": 3, "pause": 0.001}, api_keys=[KEY]) as running:
        yield running


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *argv: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    monkeypatch.setattr(cli_chat, "open_engine", lambda settings: pytest.fail("loaded"))
    code = cli.main(["chat", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def addresses(server: Running) -> list[str]:
    return [server.ws, f"grpc://{server.grpc}"]


@pytest.mark.parametrize("kind", [0, 1], ids=["ws", "grpc"])
def test_turns_go_to_the_server(
    server: Running, kind: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(cli_connect.API_KEY, KEY)
    where = addresses(server)[kind]
    code, out, err = chat(monkeypatch, capsys, "hello\nyou\n/quit\n", "--connect", where)
    # It echoes the whole conversation, its own answers included.
    assert (code, out) == (0, "hello\nhellohelloyou\n")
    assert "6 tokens, stop, 3.00 tokens per step" in err and "4 of 6 guesses accepted" in err
    assert "tokens per step: 3 x2" in err


@pytest.mark.parametrize("kind", [0, 1], ids=["ws", "grpc"])
def test_what_the_server_refuses_is_told_and_dropped(
    server: Running, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    argv = ["--connect", addresses(server)[kind], "--key-file", str(key), "--quiet"]
    text = "x" * 5000 + "\nhi\n"
    code, out, err = chat(monkeypatch, capsys, text, *argv)
    assert (code, out) == (0, "hi\n")
    assert "context_length_exceeded" in err


def test_a_key_is_needed(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(cli_connect.API_KEY, raising=False)
    code, _, err = chat(monkeypatch, capsys, "hi\n", "--connect", server.ws)
    assert code == 1 and "connect: unauthorized" in err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--connect", "ftp://h"], 2),
        (["--connect", "ws://127.0.0.1:9"], 1),
        (["--connect", "grpc://127.0.0.1:9"], 1),
        (["--connect", "ws://127.0.0.1:9", "--key-file", "/nowhere/at/all"], 2),
        (["--connect", "wss://127.0.0.1:9", "--ca", "/nowhere/at/all"], 2),
    ],
)
def test_nobody_there(
    argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    got, _, err = chat(monkeypatch, capsys, "hi\n", *argv)
    assert got == code and "connect: " in err and "Traceback" not in err


def test_an_interrupt_stops_the_answer_not_the_chat(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli_connect.API_KEY, KEY)
    show: Any = cli_chat.show

    def interrupting(text: str) -> None:
        show(text)
        if text and not seen:
            seen.append(text)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    seen: list[str] = []
    monkeypatch.setattr(cli_chat, "show", interrupting)
    argv = ["--connect", server.ws, "--quiet", "--ignore-eos", "--max-tokens", "3000"]
    code, out, _ = chat(monkeypatch, capsys, "abc\n/reset\nde\n", *argv)
    first, second, end = out.split("\n")
    assert code == 0 and end == ""
    assert first.startswith("abc") and len(first) < 3000
    assert second == "de" * 1500
