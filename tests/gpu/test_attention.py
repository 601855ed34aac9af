"""Tree attention on a real GPU: every case, tuned tiles, a captured graph, and an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_serve.bench.gpu_cases import Case, bushy, error, large_cases, make, small_cases
from spec_serve.cache.tree import root
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.base import pick_backend
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.target.model import load_model
from tests.engines import FLAT, prompts, request, run
from tests.tiny import noisy_copy, tiny_checkpoint

pytestmark = pytest.mark.gpu
CASES = small_cases() + large_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_equals_the_reference(case: Case) -> None:
    from spec_serve.kernels.tree_attention import TritonAttention

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert error(case, TritonAttention(processors), "cuda") < 1


def test_tuned_tiles_are_right_and_kept(tmp_path: Path) -> None:
    from spec_serve.kernels.attention_tuning import TunedTiles
    from spec_serve.kernels.tree_attention import TritonAttention

    path = tmp_path / "tiles.json"
    tiles = TunedTiles(torch.device("cuda:0"), path)
    for rows in (((900, root(1)),), ((300, bushy(31, 1)),)):
        case = Case("tuned", rows, 16, 4, 128, torch.bfloat16)
        assert error(case, TritonAttention(132, tiles), "cuda") < 1
    assert path.exists()


def test_a_graph_follows_what_lies_in_its_tensors() -> None:
    """Captured once, replayed on other positions, slots and values at the same addresses."""
    backend = pick_backend("cuda")
    first = make(Case("graph", ((300, root(1)), (9, bushy(7, 1))), 8, 2, 128), "cuda")
    second = make(Case("graph", ((120, root(1)), (280, bushy(7, 2))), 8, 2, 128), "cuda", seed=1)
    table = torch.zeros(2, 400, dtype=torch.int64, device="cuda")
    slots = max(first.kv.k.shape[0], second.kv.k.shape[0])
    k, v = (torch.zeros(slots, 2, 128, device="cuda") for _ in range(2))
    kv = type(first.kv)(k, v)
    names = type(first.batch).__slots__

    def load(problem) -> None:  # type: ignore[no-untyped-def]
        for name in names:
            getattr(first.batch, name).copy_(getattr(problem.batch, name))
        table[:, : problem.table.shape[1]] = problem.table
        for held, part in ((k, problem.kv.k), (v, problem.kv.v)):
            held[: len(part)] = part
        for part, fresh in zip((first.q, first.k, first.v), (problem.q, problem.k, problem.v),
                               strict=True):  # fmt: skip
            part.copy_(fresh)

    def attend() -> torch.Tensor:
        return backend.plan(first.batch, table).attend(first.q, first.k, first.v, kv, scale=0.1)

    load(first)
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for problem in (second, make(first.case, "cuda", seed=2)):
        load(problem)
        graph.replay()
        expected = TorchAttention().plan(first.batch, table)
        again = expected.attend(first.q, first.k, first.v, kv, scale=0.1)
        torch.testing.assert_close(out, again, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_token(temperature: float) -> None:
    """float32 throughout: near-ties that flip are not expected among so few tokens."""
    model = load_model(tiny_checkpoint(), torch.float32, "cuda")
    near = load_model(noisy_copy(tiny_checkpoint(), 0.25), torch.float32, "cuda")
    answers = []
    for draft in (None, StandaloneDrafter(near, pick_backend("cuda"))):
        options = EngineOptions(target="tiny", kv_tokens=2048, max_rows=4, device="cuda")
        made = assemble(model, options, drafter=draft, lookup=False, cost=CostCurve(FLAT))
        made.builder.grow_always(4, 2)
        asked = [request(p, 24, temperature=temperature, seed=7) for p in prompts(3, seed=1)]
        answers.append([done.tokens for done in run(made, *asked)])
    assert answers[0] == answers[1]
