"""What a server keeps of its traffic: whole answers that may be kept, as token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_serve.api.adapt_traffic import TrafficKeeper
from spec_serve.draft.train.traffic import read
from spec_serve.spec.request import (
    Delta,
    Event,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    StepRecord,
    Usage,
)

STEP = StepRecord(1, 0, 0, {}, 0, 0, 0, 1, [], [])


def said(request: Request, tokens: list[int], index: int = 0, failed: bool = False) -> list[Event]:
    """The events of one choice, its tokens in two steps."""
    error = RequestError("", "it failed", "engine_error") if failed else None
    end = Finished(
        request, index, "error" if failed else "stop", None, Usage(1, 0, 1),
        RequestTimings(0, 0, 0, 0), error,
    )  # fmt: skip
    halves = tokens[:3], tokens[3:]
    return [*(Delta(request, index, half, None, STEP) for half in halves), end]


def test_what_is_kept(tmp_path: Path) -> None:
    tokens = list(range(10, 22))
    plain, salted = Request("a", [1, 2], n=2), Request("b", [3], salt="mine")
    keeper = TrafficKeeper(tmp_path, 1 << 20)
    both = zip(said(plain, tokens), said(plain, tokens[::-1], 1), strict=True)
    keeper.observe([event for pair in both for event in pair])
    keeper.observe(said(salted, tokens))
    keeper.observe(said(Request("c", [4]), tokens, failed=True))
    keeper.observe(said(Request("d", [5]), tokens[:5]))  # too short
    keeper.observe(said(Request("e", [6], segments=(plain,)), tokens))
    keeper.close()
    found = [(list(one.prompt), list(one.answer)) for one in read(tmp_path)]
    assert found == [([1, 2], tokens), ([1, 2], tokens[::-1])]

    keeper = TrafficKeeper(tmp_path, 1 << 20, salted=True)
    keeper.observe(said(salted, tokens))
    keeper.close()
    assert [list(one.prompt) for one in read(tmp_path)] == [[1, 2], [1, 2], [3]]


def test_a_disk_that_fails_costs_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="adapt-folder"):
        TrafficKeeper(tmp_path / "file", 1 << 20)
    folder = tmp_path / "folder"
    keeper = TrafficKeeper(folder, 1 << 20)
    folder.rmdir()
    keeper.observe(said(Request("a", [1]), list(range(9))))
    keeper.observe(said(Request("b", [1]), list(range(9))))
    keeper.close()
