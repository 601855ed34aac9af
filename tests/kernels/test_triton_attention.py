"""Triton's tree attention in its interpreter against the torch reference; how tiles are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_serve.bench.gpu_cases import Case, bushy, error, make, small_cases, wanted
from spec_serve.cache.tree import chain, root
from spec_serve.draft.cost import CostCurve
from spec_serve.kernels import base
from spec_serve.kernels.base import pick_backend
from spec_serve.kernels.reference import TorchAttention
from spec_serve.kernels.tree_attention import Shape, TritonAttention, default_tile, kind_of
from spec_serve.kernels.tuning import Tile, Tuner
from spec_serve.spec.assemble import EngineOptions, assemble
from tests.engines import FLAT, drafter, target, tokens
from tests.kernels.interpreted import DEVICE, INTERPRETED

CASES = small_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_equals_the_reference(case: Case) -> None:
    """Every mask, head size and dtype, with NaN in TRASH and in all slots that are nobody's."""
    assert error(case, TritonAttention(6), DEVICE) < 1


@pytest.mark.parametrize("seed", range(3))
def test_random_batches(seed: int) -> None:
    """Sizes around the edges of tiles and blocks, tiles and splits of several sizes."""
    pick = torch.Generator().manual_seed(seed)

    def of(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=pick))]

    rows = []
    for i in range(of(1, 2, 5)):
        size = of(1, 2, 7, 8, 9, 17)
        tree = chain(range(size)) if of(0, 1) else bushy(size, 10 * seed + i, of(1, min(3, size)))
        rows.append((of(0, 1, 15, 16, 17, 63, 64, 65, 100), tree))
    kv_heads = of(1, 2)
    heads, window = kv_heads * of(1, 3, 4), (None, 5, 33)[seed % 3]
    case = Case("random", tuple(rows), heads, kv_heads, window=window)
    lines, keys = of(16, 32), of(16, 32)
    assert error(case, TritonAttention(of(1, 4, 40), lambda _: Tile(lines, keys, 4, 2)), DEVICE) < 1


def test_a_long_prefix_is_split_and_short_ones_are_not() -> None:
    case = Case("split", ((330, root(1)), (3, root(2)), (3, bushy(9, 1))), 4, 1)
    problem = make(case, DEVICE)
    plan = TritonAttention(8, lambda _: Tile(16, 16, 4, 2)).plan(problem.batch, problem.table)
    out = plan.attend(problem.q, problem.k, problem.v, problem.kv, scale=64**-0.5)
    torch.testing.assert_close(out.cpu(), wanted(problem), rtol=0, atol=2e-6)
    (work,) = plan._work.values()
    items, parts, merged, splits = work.data.tolist()
    assert splits[0] > 4 and splits[1:3] == [1, 1]
    tiles = [1, 1, 3]  # four nodes of four heads each in a tile
    assert items == [0, splits[0], splits[0] + 1, splits[0] + 1 + tiles[2]]
    assert parts[1:] == [splits[0]] * 3 and merged[1:] == [1, 1, 1]
    assert items[-1] <= work.items


def test_one_plan_serves_layers_of_several_kinds() -> None:
    """Scratch and work are shared, and nothing leaks from one layer to the next."""
    problem = make(Case("layers", ((70, bushy(9, 1)), (2, root(1)))), DEVICE)
    plan = TritonAttention(8).plan(problem.batch, problem.table)
    for window in (None, 4, None):
        kinds = {"scale": 0.2, "window": window}
        q = torch.randn_like(problem.q)
        out = plan.attend(q, problem.k, problem.v, problem.kv, **kinds)
        again = TorchAttention(exact=True).plan(problem.batch, problem.table)
        expected = again.attend(q, problem.k, problem.v, problem.kv, **kinds)
        torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


def test_a_wrong_answer_is_found() -> None:
    """The check itself: a mask that is off by one node is seen."""
    case = CASES[0]

    class Blind(TorchAttention):
        def plan(self, batch, table, first=0):  # type: ignore[no-untyped-def]
            less = replace(batch, prefix=(batch.prefix - 1).clamp(min=0))
            return super().plan(less, table, first)

    assert error(case, Blind(exact=True)) > 1


def test_kinds_and_default_tiles() -> None:
    assert [kind_of(n, 4) for n in (3, 4, 5, 256, 257)] == ["root", "root", "tree", "tree", "chunk"]
    for kind in ("root", "tree", "chunk"):
        for dim in (64, 80, 256):
            tile = default_tile(Shape(80, 2, dim, torch.float32, kind))
            assert tile.lines >= 64 and tile.keys >= 16  # 40 heads share a tile


def test_tiles_are_timed_once_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiles.json"
    tiles = [Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)]
    asked: list[Tile] = []

    def seconds(tile: Tile) -> float:
        asked.append(tile)
        if tile.lines == 64:
            raise RuntimeError("out of shared memory")
        return 1.0 / tile.lines

    assert Tuner(path).best("a", tiles, seconds) == tiles[1]
    assert asked == tiles
    assert Tuner(path).best("a", tiles, seconds) == tiles[1] and len(asked) == 3
    assert Tuner(path).best("a", tiles[:1], seconds) == tiles[0], "no longer a candidate"
    with pytest.raises(RuntimeError, match="out of shared memory"):
        Tuner(None).best("b", tiles[2:], seconds)
    assert len(json.loads(path.read_text())) == 1
    for broken in ("{", "[1]", '{"1|a": 3}', '{"1|a": ["x", 1, 2, 3]}', '{"1|a": [1]}'):
        path.write_text(broken)
        assert Tuner(path).best("a", tiles, seconds) == tiles[1]


@pytest.mark.skipif(not INTERPRETED, reason="it is about machines without a GPU")
def test_backends_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_backend("cpu").name == "torch"
    with pytest.raises(ValueError, match="attention: unknown backend 'magic'"):
        pick_backend("cpu", "magic")
    with pytest.raises(ValueError, match="attention: triton's kernels run on .* not on cpu"):
        pick_backend("cpu", "triton")
    with pytest.raises(ValueError, match="torch finds none"):
        pick_backend("cuda", "triton")
    assert pick_backend("cuda").name == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ValueError, match="need compute capability 8.0"):
        pick_backend("cuda", "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    made = TritonAttention(132)
    monkeypatch.setattr(base, "_triton", lambda device: made)
    assert pick_backend("cuda") is made and pick_backend("cuda", "torch").name == "torch"


@pytest.mark.skipif(not INTERPRETED, reason="its model is on the CPU")
def test_an_engine_answers_as_with_torch() -> None:
    """Prompt and trees of guesses on Triton's kernels: the tokens of plain decoding in torch."""
    answers = []
    for attention, kind in ((None, "none"), (TritonAttention(1), "near")):
        options = EngineOptions(target="tiny", draft=kind, kv_tokens=512, max_rows=2)
        made = assemble(
            target(), options, attention=attention, drafter=drafter(kind), lookup=False,
            cost=CostCurve(FLAT),
        )  # fmt: skip
        made.builder.grow_always(2, 2)
        answers.append(tokens(made, [5, 6, 7, 8, 9], 4, temperature=0.7, seed=3))
    assert answers[0] == answers[1] and len(answers[0]) == 4
