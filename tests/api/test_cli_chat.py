"""`spec-serve chat` on a tiny engine: turns, commands, what speculation did, errors, and the cache.

Reads its lines from a replaced standard input; models are never loaded.
"""

from __future__ import annotations

import io
import re
import signal

import pytest

from spec_serve.api import cli, cli_chat
from spec_serve.api.settings import Settings
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Event
from tests.api.tokens import TinyTokens
from tests.engines import engine, tokens

TOKENS = TinyTokens()
ARGV = ["chat", "--target", "t", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine the command gets: the target drafts for itself."""
    made = engine("self", max_context=256)

    def open_engine(settings: Settings) -> tuple[Engine, TinyTokens]:
        return made, TOKENS

    monkeypatch.setattr(cli_chat, "open_engine", open_engine)
    return made


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *argv: str
) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert cli.main([*ARGV, *argv]) == 0
    out, err = capsys.readouterr()
    return out, err


def answers(system: str | None, *turns: str) -> list[str]:
    """What the plain engine says to these turns, the whole history given each time."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    said = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = TOKENS.decode(tokens(engine("none"), TOKENS.render_chat(messages), 8))
        said.append(text)
        messages.append({"role": "assistant", "content": text})
    return said


def test_turns_see_the_turns_before_and_the_cache(
    made: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = chat(monkeypatch, capsys, "the other\n\nin\n", "--system", "on")
    assert out == "".join(f"{text}\n" for text in answers("on", "the other", "in"))
    assert made.stats().prefix_hit_tokens > len(TOKENS.encode("the other"))
    counts = [re.findall(r"(\d+) x(\d+)", line) for line in err.splitlines() if " x" in line]
    assert [sum(int(t) * int(n) for t, n in line) for line in counts] == [8, 8]
    assert len(re.findall(r"8 tokens, length, [\d.]+ tokens per step", err)) == 2


def test_reset_forgets_and_quit_ends(
    made: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = chat(monkeypatch, capsys, "the\n/reset\nthe\n/quit\nmore\n", "--quiet")
    (once,) = answers(None, "the")
    assert out == f"{once}\n{once}\n"
    assert err == "spec-serve: forgotten\n"


def test_a_message_that_does_not_fit_is_told_and_dropped(
    made: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = chat(monkeypatch, capsys, "x" * 400 + "\nthe\n", "--quiet")
    assert out == f"{answers(None, 'the')[0]}\n"
    assert "the context holds 256" in err
    assert "/reset" in err


def test_an_interrupt_stops_the_answer_not_the_chat(
    made: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, calls = Engine.step, 0

    def interrupted(self: Engine) -> list[Event]:
        nonlocal calls
        calls += 1
        if calls == 1:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    out, _ = chat(monkeypatch, capsys, "the\n/reset\nthe\n", "--quiet", "--speculation", "off")
    first, second = out.split("\n", 1)
    full = answers(None, "the")[0]
    assert second == f"{full}\n"
    assert full.startswith(first)
    assert len(first) < len(full)


def test_a_model_without_a_template_is_refused(
    made: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TOKENS, "chat_template", None)
    assert cli.main(ARGV) == 1
    assert "no chat template" in capsys.readouterr().err


def test_bad_flags_are_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_chat, "open_engine", lambda settings: pytest.fail("loaded"))
    assert cli.main([*ARGV, "--top-p", "2"]) == 2
    assert "sampling.top_p" in capsys.readouterr().err
