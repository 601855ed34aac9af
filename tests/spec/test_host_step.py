"""Steps in Python on a processor find what steps in tensor operations do, job by job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_serve.spec.host_step import HostDevice
from spec_serve.spec.request import Constraint
from spec_serve.spec.step import Job, Result, TorchDevice
from tests.draft.heads import for_target
from tests.engines import drafter, engine, prompts, request, run, target
from tests.grammars import spelling


class Twice(HostDevice):
    """Runs every job both ways: table, verdicts, trees and log-probabilities must be the same."""

    seen: list[tuple[int, int, int]] = []

    def step(self, job: Job) -> Result:
        """See `Device`."""
        held = self.pool.table.clone()
        there = TorchDevice.step(self, job)
        written = self.pool.table[:, :-1].clone()
        self.pool.table.copy_(held)
        here = super().step(replace(job, meanwhile=[]))
        assert torch.equal(self.pool.table[:, :-1], written)
        assert here.trees.keys() == there.trees.keys()
        for b, (tokens, parents, scores) in here.trees.items():
            assert (tokens, parents) == there.trees[b][:2]
            assert scores == pytest.approx(there.trees[b][2], abs=1e-4)
        same = replace(there, trees={}, verify_us=0, draft_us=0)
        assert replace(here, trees={}, verify_us=0, draft_us=0) == same
        self.seen.append(
            (len(job.twigs), sum(map(len, here.paths)), sum(len(t[0]) for t in here.trees.values()))
        )
        return here


@pytest.mark.parametrize("kind", ["lookup", "near", "eagle3", "modules", "dflash"])
def test_both_ways_of_a_step_are_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt chunks, replays after a hit, trees, sampling, penalties, scores, choices, masks."""
    monkeypatch.setattr("spec_serve.spec.runner.HostDevice", Twice)
    seen: list[tuple[int, int, int]] = []
    Twice.seen = seen
    draft = drafter(kind) if kind in ("lookup", "near") else for_target(kind, target())
    on = engine(
        kind, draft=draft, depth=3, width=2, step_tokens=16, spelling=spelling(), lookup=True
    )
    texts = prompts(4, 6, 40)
    asked = [
        request(texts[0], 20),
        request(texts[1], 12, temperature=0.9, seed=3, top_p=0.9, logprobs=2),
        request(texts[2], 12, repetition_penalty=1.3, prompt_logprobs=1, n=2, temperature=0.5),
        request(texts[3], 16, constraint=Constraint("regex", "[ab]{3}the end of all[0-9]+")),
    ]
    run(on, *asked)
    run(on, request(texts[0], 20), request(texts[0][:4], 6))
    rows, right, grown = (max(column) for column in zip(*seen, strict=True))
    assert rows > 3 and right > 0
    assert (grown > 0) == (kind != "lookup")
