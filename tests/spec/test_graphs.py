"""Steps as graphs on a CPU: a strict recorder stands for CUDA's; tokens and trees stay the same.

The engine's requests mix what graphs do whole (greedy and sampled rows), what is queued behind a
recorded forward (filters, penalties, log-probabilities) and what fits none (long prompts).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_serve.cache.pool import KVPool
from spec_serve.draft.base import Drafter
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.noise import _to_gumbel, bits
from spec_serve.spec import operations, sampling
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.spec.frames import MOST, Tier, pick, tiers
from spec_serve.spec.request import Request
from spec_serve.spec.runner import PER_GRAPH, Sizes, record, workspace
from spec_serve.spec.step import Job, Result, TorchDevice
from tests.dense import DenseAttention
from tests.draft.heads import for_target
from tests.engines import FLAT, near, prompts, request, run, target
from tests.recorded import Recorder, Waits

SIZES = Sizes(rows=2, nodes=3, tokens=512, graphs=True)


@pytest.fixture(autouse=True)
def noise_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise by torch operators, as on a GPU; on a CPU it would be numpy's."""

    def gumbel_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        return _to_gumbel(bits(seeds, positions, tokens.to(torch.int32)))

    def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
        return gumbel_of(seeds, positions, torch.arange(vocab)[None])

    for module in (operations, sampling):
        monkeypatch.setattr(module, "gumbel", gumbel)
    monkeypatch.setattr(sampling, "gumbel_of", gumbel_of)


class Twice:
    """Runs every step without graphs and, on a pool of its own, with them; they must agree."""

    def __init__(self, kind: str, sizes: Sizes = SIZES) -> None:
        model, attention = target(), DenseAttention()
        plain, draft = drafter(kind), drafter(kind)
        options = EngineOptions(
            target="tiny", kv_tokens=400, max_rows=sizes.rows, max_context=96,
            max_nodes=sizes.nodes, speculation="max",
        )  # fmt: skip
        self.engine = assemble(
            model, options, drafter=plain, lookup=False, attention=attention, cost=CostCurve(FLAT)
        )
        self.engine.builder.grow_always(2, 2)
        pool = self.engine._device.pool  # type: ignore[attr-defined]
        self.plain = TorchDevice(model, pool, attention, plain)
        rows, columns = pool.table.shape
        own = KVPool(pool.specs, pool.slots, rows, columns - 1)
        self.recorded = TorchDevice(model, own, attention, draft)
        self.capture = Recorder()
        self.shares: list[float] = []
        record(self.recorded, self.capture, sizes, self.shares.append, early=kind == "eagle3")
        self.engine._device = self
        self.steps = self.given = 0

    def step(self, job: Job) -> Result:
        mine = self.recorded.pool.table
        mine.copy_(self.plain.pool.table)
        expected, result = self.plain.step(job), self.recorded.step(job)
        forget = mine.shape[1] - 1
        assert torch.equal(mine[:, :forget], self.plain.pool.table[:, :forget])
        assert (result.paths, result.bonus) == (expected.paths, expected.bonus)
        assert result.trees.keys() == expected.trees.keys()
        for b, (tokens, parents, scores) in expected.trees.items():
            assert result.trees[b][:2] == (tokens, parents)
            assert result.trees[b][2] == pytest.approx(scores, abs=1e-4)
        for b, scored in expected.logprobs.items():
            assert [s[0] for s in result.logprobs[b]] == [s[0] for s in scored]
            assert [s[1] for s in result.logprobs[b]] == pytest.approx(
                [s[1] for s in scored], abs=1e-4
            )
        self.steps += 1
        self.given += any(twig.tree.given > 1 for twig in job.twigs)
        return expected


def drafter(kind: str) -> Drafter:
    if kind == "standalone":
        return StandaloneDrafter(near(), DenseAttention())
    made = for_target(kind, target())
    made._attention = DenseAttention()  # type: ignore[attr-defined]
    return made


def asked() -> list[Request]:
    """Some are more than temperature and seed, and the prompts are longer than any tier."""
    more: list[dict[str, object]] = [
        {}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.8, "top_p": 0.8, "seed": 6},
        {"frequency_penalty": 0.4, "logprobs": 2},
    ]  # fmt: skip
    given = prompts(len(more), 20, 40, seed=3)
    return [request(p, 10, **kw) for p, kw in zip(given, more, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["standalone", "eagle3"])
def test_steps_are_those_without_graphs(kind: str) -> None:
    """Tokens, paths, tables, trees and scores, for drafters with taps and without."""
    twice = Twice(kind)
    plain, others = asked()[:2], asked()[2:]
    run(twice.engine, *plain)
    if kind == "eagle3":
        run(twice.engine, *others)
    assert twice.recorded.graphs is not None
    count = 2 * len(twice.recorded.graphs.tiers)
    replays = twice.capture.replays
    forwards, verdicts, drafts = sum(replays[:count:2]), sum(replays[1:count:2]), replays[count:]
    assert 0 < twice.given <= twice.steps - forwards
    assert 0 < verdicts <= forwards and (verdicts < forwards) == (kind == "eagle3")
    assert len(drafts) > 0 and 0 < sum(drafts) <= forwards
    # A chain of one, two or three guesses for one row is recorded at start, like the rest of it.
    assert len(twice.shares) == count // 2 + 1 + (3 if kind == "eagle3" else 0)
    assert twice.shares == sorted(twice.shares) and twice.shares[-1] == 1.0


def test_a_drafter_that_waits_goes_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    twice = Twice("modules", Sizes(1, 1, 512, True))
    run(twice.engine, *asked()[:1])
    assert twice.recorded.graphs is not None
    assert len(twice.capture.replays) == 2 * len(twice.recorded.graphs.tiers)
    assert "runs without a graph" in caplog.text


def test_tiers_and_their_room() -> None:
    """The least that fits is taken, and few rows with many nodes need no tier of many rows."""
    made = tiers(12, 31)
    assert made[0] == Tier(1, 1) and max(tier.nodes for tier in made) <= MOST
    assert {tier.rows for tier in made} == {1, 2, 4, 8, 12}
    assert pick(made, 3, 20) == Tier(4, 32) and pick(made, 1, 33) == Tier(2, 64)
    assert pick(made, 13, 13) is None and pick(made, 1, MOST + 1) is None
    config = target().config
    more = workspace(config, Sizes(12, 31, 512, True), True)
    assert more - workspace(config, Sizes(12, 31, 512, True), False) == 2 * len(made) * PER_GRAPH


def test_work_that_waits_is_refused() -> None:
    """The recorder sees what a device would not forgive: reading, copying in, memory that went."""
    kept = torch.zeros(3)
    for work in (
        lambda: kept.sum().item(), lambda: kept.tolist(), lambda: kept.add_(torch.tensor([1.0])),
        lambda: kept.nonzero(), lambda: bool(kept.any()), lambda: kept.__setitem__(1, 2.0),
    ):  # fmt: skip
        with pytest.raises(Waits):
            Recorder().record(work)  # type: ignore[arg-type]
    held = [torch.ones(3)]
    replay = Recorder().record(lambda: kept.copy_(held[0] + 1))  # type: ignore[arg-type, return-value]
    held[0].fill_(4)
    replay()
    assert kept.tolist() == [5, 5, 5]
    held.clear()
    with pytest.raises(AssertionError, match="gone"):
        replay()
