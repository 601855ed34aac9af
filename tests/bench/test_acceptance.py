"""`bench acceptance`: what is counted, and a run on a tiny model; no share is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spec_serve.bench.acceptance import Tally, deepest, main
from spec_serve.spec.request import StepRecord
from tests.tiny import write_tiny_model_dir


def step(parents: list[int], accepted: int) -> StepRecord:
    count = len(parents)
    told = {"a": (count - 1, accepted), "b": (1, 0)}
    return StepRecord(1, count, accepted, told, 0, 0, 0, 1, [0] * count, parents)


def test_what_is_counted() -> None:
    assert deepest([]) == 0 and deepest([-1, -1, 0, 2]) == 3
    tally = Tally()
    tally.add(step([-1, 0, 1], 2))
    tally.add(step([-1, 0, 1, 0], 0))
    tally.add(step([-1, -1], 1))
    assert (tally.steps, tally.tokens, tally.drafted, tally.accepted) == (3, 6, 9, 3)
    assert tally.per_step == 2.0
    assert tally.depths() == [(1, 2 / 3), (2, 0.5), (3, 0.0)]
    assert tally.sources["a"] == [6, 3] and tally.sources["b"] == [3, 0]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model_dir(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"category": name, "turns": ["la la la la la"]} for name in ("song", "talk")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    threads = torch.get_num_threads()
    main([
        "--target", str(model), "--prompts", str(prompts), "--max-tokens", "12", "--nodes", "3",
        "--temperatures", "0", "1", "--json", str(tmp_path / "a.json"),
        "--html", str(tmp_path / "a.html"),
    ])  # fmt: skip
    torch.set_num_threads(threads)
    report = json.loads((tmp_path / "a.json").read_text())
    assert [record["category"] for record in report["records"]] == 2 * ["song", "talk", "ALL"]
    song, talk, both = report["records"][:3]
    assert both["steps"] == song["steps"] + talk["steps"] > 0 and both["tok/step"] >= 1
    assert "tok/step" in capsys.readouterr().out
    text = (tmp_path / "a.html").read_text()
    assert text.count("<svg") == 3 and "Spec-Bench leaderboard" in text
    # Our own figures stand among the published ones, and warm answers beside cold ones.
    assert "this run" in text and "Tokens per step by category" in text
    warm = {row["category"]: row["of T = 0"] for row in report["warmth"]}
    assert warm["ALL"] == report["records"][5]["tok/step"] / both["tok/step"]
