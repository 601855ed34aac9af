"""`spec-serve generate` on a tiny engine: the text, the JSON object, stops, refusals, Ctrl-C.

Models are never loaded here: `open_engine` is replaced by an engine made in memory.
"""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from spec_serve.api import cli, cli_generate
from spec_serve.api.cli_prompt import step_json
from spec_serve.api.settings import Settings
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Event, StepRecord
from tests.api.tokens import TinyTokens
from tests.engines import engine, tokens

TOKENS = TinyTokens()
PROMPT = "the other the other"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings the engine was asked for with; greedy drafts by the target itself."""
    seen: list[Settings] = []

    def open_engine(settings: Settings) -> tuple[Engine, TinyTokens]:
        seen.append(settings)
        kind = "none" if settings["speculation"] == "off" else "self"
        return engine(kind, speculation=settings["speculation"]), TOKENS

    monkeypatch.setattr(cli_generate, "open_engine", open_engine)
    return seen


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    code = cli.main(["generate", "--target", "tiny", "--json", *argv])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("\n") == 1
    held = json.loads(out)
    assert isinstance(held, dict)
    return held


def expected(prompt: list[int], count: int) -> list[int]:
    return tokens(engine("none"), prompt, count)


@pytest.mark.parametrize("mode", ["off", "auto", "max"])
def test_json_holds_what_the_engine_says(
    opened: list[Settings], capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    argv = ("--prompt", PROMPT, "--max-tokens", "24", "--ignore-eos", "--speculation", mode)
    held = run_json(capsys, *argv)
    prompt = TOKENS.encode(PROMPT)
    assert held["token_ids"] == expected(prompt, 24)
    assert held["text"] == TOKENS.decode(held["token_ids"])
    assert held["finish_reason"] == "length"
    assert held["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 24,
        "cached_tokens": 0,
    }
    assert held["timings"]["ttft_ms"] > 0
    assert held["timings"]["decode_ms"] >= 0
    steps = held["timings"]["steps"]
    keys = {"drafted", "accepted", "source", "draft_us", "verify_us", "host_us"}
    assert all(set(step) == keys for step in steps)
    assert sum(step["accepted"] + 1 for step in steps) == 24
    assert all((step["source"] == "none") == (step["drafted"] == 0) for step in steps)
    drafted = sum(step["drafted"] for step in steps)
    if mode == "off":
        assert drafted == 0
        assert {step["source"] for step in steps} == {"none"}
    else:
        assert drafted > 0
        assert len(steps) < 24
    assert opened[0]["speculation"] == mode


def test_text_is_streamed_to_standard_output(
    opened: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--target", "t", "--prompt", PROMPT, "--max-tokens", "16", "--ignore-eos"]
    assert cli.main(["generate", *argv]) == 0
    out, err = capsys.readouterr()
    assert out == TOKENS.decode(expected(TOKENS.encode(PROMPT), 16)) + "\n"
    assert "16 tokens, length" in err
    assert cli.main(["generate", *argv, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_messages_are_rendered(
    opened: list[Settings], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "on"}, {"role": "user", "content": "the"}]
    file = tmp_path / "m.json"
    file.write_text(json.dumps(messages))
    held = run_json(capsys, "--messages-file", str(file), "--max-tokens", "6", "--ignore-eos")
    assert held["token_ids"] == expected(TOKENS.render_chat(messages), 6)
    held = run_json(capsys, "--chat", "the", "--max-tokens", "6", "--ignore-eos")
    assert held["token_ids"] == expected(TOKENS.render_chat(messages[1:]), 6)


def test_prompt_from_files_and_standard_input(
    opened: list[Settings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "p.txt"
    file.write_text(PROMPT)
    want = expected(TOKENS.encode(PROMPT), 5)
    common = ("--max-tokens", "5", "--ignore-eos")
    assert run_json(capsys, "--prompt-file", str(file), *common)["token_ids"] == want
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert run_json(capsys, "--prompt-file", "-", *common)["token_ids"] == want


def test_a_stop_string_ends_the_text_before_it(
    opened: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    full = expected(TOKENS.encode(PROMPT), 24)
    text = TOKENS.decode(full)
    stop = text[5:7]
    at = text.index(stop)
    for mode in ("off", "max"):
        held = run_json(
            capsys, "--prompt", PROMPT, "--max-tokens", "24", "--ignore-eos",
            "--stop", stop, "--stop", "never this", "--speculation", mode,
        )  # fmt: skip
        assert held["text"] == text[:at]
        assert (held["finish_reason"], held["matched"]) == ("stop", stop)
        ids = held["token_ids"]
        assert ids == full[: len(ids)]
        assert stop in TOKENS.decode(ids)
        assert stop not in TOKENS.decode(ids[:-1])


def test_sampling_is_by_the_seed_and_logprobs_come(
    opened: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos", "--temperature", "1")
    one = run_json(capsys, *argv, "--seed", "1", "--logprobs", "2")
    prompt = TOKENS.encode(PROMPT)
    assert one["token_ids"] == tokens(engine("none"), prompt, 12, temperature=1.0, seed=1)
    assert one["token_ids"] != expected(prompt, 12)
    assert [scored["token_id"] for scored in one["logprobs"]] == one["token_ids"]
    assert all(len(scored["top"]) == 2 for scored in one["logprobs"])
    best = one["logprobs"][0]["top"][0]
    assert best["token"] == TOKENS.token_text(best["token_id"])
    assert best["logprob"] >= one["logprobs"][0]["logprob"]


def test_the_models_end_is_an_end_unless_ignored(
    opened: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = expected(TOKENS.encode(PROMPT), 12)
    monkeypatch.setattr(TOKENS, "eos_ids", frozenset({full[4]}))
    held = run_json(capsys, "--prompt", PROMPT, "--max-tokens", "12")
    assert held["token_ids"] == full[: full.index(full[4]) + 1]
    assert (held["finish_reason"], held["matched"]) == ("stop", full[4])
    held = run_json(capsys, "--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos")
    assert held["token_ids"] == full


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prompt", "a", "--temperature", "-1"], "sampling.temperature"),
        (["--prompt", "a", "--temperature", "nan"], "sampling.temperature"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "a", "--stop", ""], "stop"),
        (["--prompt", "a", "--json", "--logprobs", "21"], "logprobs"),
        (["--messages-file", "gone.json"], "messages-file: gone.json"),
        (["--prompt", "a", "--speculation", "some"], "speculation: must be one of"),
    ],
)
def test_refused_before_anything_is_loaded(
    opened: list[Settings], capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert cli.main(["generate", "--target", "t", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, opened) == ("", [])
    assert err.startswith("spec-serve: error: ")
    assert said in err


@pytest.mark.parametrize("text", ["{", "{}", "[]", '[{"content": "x"}]', '[{"role": "king"}]'])
def test_messages_that_are_none_are_refused(
    opened: list[Settings], capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    assert cli.main(["generate", "--target", "t", "--messages-file", str(file)]) == 2
    assert "messages" in capsys.readouterr().err
    assert opened == []


def test_a_prompt_beyond_the_context_is_refused(
    opened: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--target", "t", "--prompt", "x" * 5000]) == 1
    out, err = capsys.readouterr()
    assert (out, "5000 tokens" in err) == ("", True)


def test_an_interrupt_ends_the_request_and_shows_what_there_is(
    opened: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Engine.step, 0

    def interrupted(self: Engine) -> list[Event]:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    argv = ["--prompt", PROMPT, "--speculation", "off", "--ignore-eos", "--json"]
    assert cli.main(["generate", "--target", "t", *argv]) == 130
    held = json.loads(capsys.readouterr().out)
    assert held["finish_reason"] == "cancelled"
    assert held["token_ids"] == expected(TOKENS.encode(PROMPT), 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_source_of_a_step() -> None:
    def shown(sources: dict[str, tuple[int, int]]) -> object:
        return step_json(StepRecord(0, 0, 0, sources, 1, 2, 3, 1, [], []))["source"]

    assert shown({}) == "none"
    assert shown({"a": (3, 1), "b": (2, 2), "c": (0, 0), "d": (4, 1)}) == "b+d+a"
