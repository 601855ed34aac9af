"""`bench soak` for some seconds on a tiny pair, and that it notices what it is there to notice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_serve.bench import soak
from spec_serve.bench.soak import Log, arguments, growth, questions
from spec_serve.bench.soak_server import unbalanced
from tests.tiny import write_tiny_model_dir


@pytest.mark.slow
def test_some_seconds_of_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = str(write_tiny_model_dir(tmp_path / "model"))
    flags = ["--target", model, "--draft", model, "--kv-tokens", "2048", "--max-rows", "4",
             "--max-context", "160", "--max-nodes", "8", "--quiet"]  # fmt: skip
    argv = ["--minutes", "0.1", "--users", "1", "--json", str(tmp_path / "j"), "--growth", "1"]
    code = soak.main([*argv, "--", *flags])
    said = capsys.readouterr().out
    assert code == 0, said
    made = json.loads((tmp_path / "j").read_text())
    assert made["wrong"] == [] and len(made["rss_mib"]) > 5
    for transport in ("http", "ws", "grpc"):
        assert made["counts"][f"{transport} answered"] > 0
    assert made["counts"]["resumed"] + made["counts"]["dropped"] > 0
    assert "memory: " in said


def test_a_server_that_does_not_start_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.main(["--minutes", "0.1", "--", "--target", str(tmp_path / "none")]) == 1
    assert "did not start" in capsys.readouterr().err


def test_books() -> None:
    fine = {"running": 0, "waiting": 0, "kv_used": 0, "requests": 7, "finished": 7}
    assert unbalanced(SimpleNamespace(**fine)) == ""
    assert unbalanced(SimpleNamespace(**fine | {"kv_used": 3})) == "kv_used is 3, not 0"
    assert unbalanced(SimpleNamespace(**fine | {"finished": 6})) == "7 requests came, 6 ended"


def test_growth() -> None:
    flat = [(float(i), 300.0 if i > 140 else 100.0 + i) for i in range(1000)]
    assert growth(flat) == pytest.approx(0)
    rising = [(float(i), 300.0 + i) for i in range(1000)]
    assert growth(rising) == pytest.approx(560 / 670, rel=0.02)
    assert growth([(at, 300.0 + at) for at, _ in flat[:100]]) == pytest.approx(24 / 373, rel=0.1)
    assert growth(flat[:50]) is growth([]) is None


def test_other_answers_are_noticed() -> None:
    log = Log()
    log.compare(1, "greedy", 5)
    log.compare(1, "off", 5)
    log.compare(1, "sampled", 6)
    log.compare(2, "off", 7)
    assert log.wrong == []
    log.compare(2, "greedy", 8)
    assert len(log.wrong) == 1 and "question 2" in log.wrong[0]
    for _ in range(200):
        log.fail("again")
    assert len(log.wrong) == 100 and log.counts["WRONG"] == 201


def test_what_follows_the_dashes_is_the_servers() -> None:
    given = arguments(["--minutes", "2", "--", "--target", "x", "--minutes"])
    assert given.minutes == 2 and given.server == ["--target", "x", "--minutes"]
    assert arguments([]).server == []
    for wrong in (["--minutes", "0"], ["--minutes", "nan"], ["--users", "0"]):
        with pytest.raises(SystemExit):
            arguments(wrong)


def test_questions_share_beginnings() -> None:
    made = questions(3)
    assert made == questions(3) != questions(4)
    texts = [q.prompt or q.messages[0]["content"] for q in made]
    assert len({text[:30] for text in texts}) <= 4 < len(set(texts))
