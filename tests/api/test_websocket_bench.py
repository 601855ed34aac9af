"""The bench of sockets runs and reports figures of the right kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_serve.api import messages as m
from spec_serve.bench import sockets


@pytest.mark.parametrize("codec", m.SUBPROTOCOLS)
def test_one_short_round(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "sockets.json"
    words = f"--rounds 1 --seconds 0.3 --sockets 3 --tick 5 --codec {codec} --json {path}"
    assert sockets.main(words.split()) == 0
    (row,) = json.loads(path.read_text())["rounds"]
    assert row["bytes"] > 50
    for name in ("ours us", "push us", "echo us", "p50 us", "push p50 us"):
        assert row[name] > 0, row
    assert row["to push"] == pytest.approx(row["ours us"] / row["push us"])
