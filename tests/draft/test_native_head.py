"""Compiled drafting against draft/feature.py on the same weights; its bits in any company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Drafter, Plan, Seen, Trees
from spec_serve.draft.eagle import read_eagle
from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead, TargetParts
from spec_serve.draft.head_file import HeadError, HeadFile
from spec_serve.draft.native_head import NativeHead, load_native_head, unfit_head
from spec_serve.kernels.cpu.quantise import QUANTISERS
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowNoise, RowSampling
from spec_serve.target.dequant import decode
from spec_serve.target.native import NativeTransformer, load_native
from tests.draft.heads import CONFIG, checkpoint, eagle3_shapes, fill, layer_shapes
from tests.engines import engine, prompts, request, run, tokens
from tests.tiny import VOCAB, MemoryCheckpoint, tiny_checkpoint

TAPS = (0, 2, 3)
DRAFTED = 200  # ids of the reduced vocabulary
SIZES = {
    **CONFIG, "vocab_size": VOCAB, "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
}  # fmt: skip
LENGTHS = (9, 300, 2)  # the second crosses a segment of the attention


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with matrices as Q8_0 means them."""
    made = dict(tensors)
    for name, weight in made.items():
        if weight.dim() == 2:
            flat = torch.empty(weight.numel())
            decode(QUANTISERS["Q8_0"](weight), "Q8_0", flat)
            made[name] = flat.view(weight.shape)
    return made


@cache
def target() -> NativeTransformer:
    return load_native(tiny_checkpoint("llama"), 2, "q8_0")


@cache
def parts() -> TargetParts:
    held = tiny_checkpoint("llama")
    return TargetParts.read(MemoryCheckpoint(held.config, rounded(held.tensors)), torch.float32)


def table() -> dict[str, Tensor]:
    """d2t of a vocabulary without every third id."""
    ids = torch.tensor([i for i in range(VOCAB) if i % 3 != 1][:DRAFTED])
    return {"d2t": ids - torch.arange(DRAFTED)}


def eagle3(**options: Any) -> HeadFile:
    shapes = eagle3_shapes(DRAFTED)
    del shapes["embed_tokens.weight"]
    if options.get("fc_norm"):
        shapes.update({f"fc_norm.{i}.weight": (64,) for i in range(3)})
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (192,)
    tensors = rounded(fill(shapes, 5)) | table()
    tensors["lm_head.weight"] *= 4
    return read_eagle3(checkpoint({**SIZES, **options}, tensors), target().config)


def eagle1() -> HeadFile:
    shapes = {
        "fc.weight": (64, 128), "fc.bias": (64,),
        "layers.0.post_attention_layernorm.weight": (64,),
        **layer_shapes("layers.0.", bias=True),
    }  # fmt: skip
    return read_eagle(
        checkpoint({**CONFIG, "vocab_size": VOCAB}, rounded(fill(shapes, 6))), target().config
    )


HEADS = {
    "plain": lambda: eagle3(),
    "normed": lambda: eagle3(norm_before_residual=True, norm_output=True, fc_norm=True),
    "before": lambda: eagle3(norm_before_fc=True),
    "eagle1": eagle1,
}


class Rows:
    """Rows of certain tokens with random features, told to a drafter."""

    def __init__(self, drafter: Drafter, wide: int, lengths: Sequence[int] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(3)
        self.drafter, self.lengths = drafter, lengths
        self.taps = [torch.randn(n, wide, generator=generator) for n in lengths]
        self.tokens = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
        self.pool = KVPool(drafter.kv_specs, 600, len(lengths), 320)
        self.slots, free = [], 1
        for row, n in enumerate(lengths):
            self.slots.append(list(range(free, free + n)))
            self.pool.assign(row, 0, self.slots[-1])
            free += n
        self.free = free
        drafter.bind(self.pool.layers, self.pool.table)

    def tell(
        self,
        rows: Sequence[int],
        start: Sequence[int],
        plan: Plan,
        temperature: float = 0.0,
        stop: int = 1000,
    ) -> Trees | None:
        """Tokens start[i] to `stop` of each row, with padding behind."""
        twigs, taps, last = [], [], []
        for row, at in zip(rows, start, strict=True):
            ids, slots = self.tokens[row][at:stop], self.slots[row][at:stop]
            last.append(sum(len(twig.tree) for twig in twigs) + len(ids) - 1)
            twigs.append(Twig(row, at, chain([*ids, 0, 0]), [*slots, 0, 0], len(ids)))
            before = torch.cat((torch.zeros(1, self.taps[row].shape[1]), self.taps[row]))
            taps.append(before[at : at + len(ids)])
            taps.append(torch.full((2, before.shape[1]), 9.0))
        length = torch.tensor([min(self.lengths[row], stop) for row in rows])
        seen = Seen(build_batch(twigs), torch.tensor(last), length, torch.cat(taps), 0 in start)
        wide = max(1, plan.depth * plan.width)
        grants = self.free + torch.arange(len(rows) * wide).view(len(rows), wide)
        sampling = Sampling(temperature=temperature)
        states = [RowSampling(sampling, 11 + row, VOCAB, [], 0, frozenset()) for row in rows]
        with torch.inference_mode():
            return self.drafter.propose(seen, grants, plan, RowNoise(states, "cpu"))


def paths(trees: Trees, row: int) -> dict[tuple[int, ...], float]:
    """Each node's tokens from the root on, and its score."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(trees.tokens[row].tolist(), trees.parents[row].tolist(), strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
    return dict(zip(made, trees.score[row].tolist(), strict=True))


def native(file: HeadFile) -> tuple[NativeHead, int]:
    return load_native_head(file, target(), activations=16), len(file.config.taps) * 64


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", HEADS)
def test_trees_are_those_of_the_torch_head(kind: str, temperature: float) -> None:
    file = HEADS[kind]()
    made, wide = native(file)
    reference = FeatureDrafter(FeatureHead(file, parts()), TorchAttention(exact=True))
    rows, start, plan = (0, 1, 2), (0, 0, 1), Plan(4, 3, 13)
    found = Rows(made, wide).tell(rows, start, plan, temperature)
    wanted = Rows(reference, wide).tell(rows, start, plan, temperature)
    assert found is not None and wanted is not None
    assert found.count.tolist() == wanted.count.tolist() == [13] * 3
    assert found.parents.min() == -1 and found.parents.max() > 2  # deep and wide
    same = 0
    for row in range(3):
        mine, theirs = paths(found, row), paths(wanted, row)
        both = mine.keys() & theirs.keys()
        assert all(abs(mine[path] - theirs[path]) < 0.01 for path in both)
        assert len(both) >= 11  # which of two nodes with nearly the same score is expanded
        same += torch.equal(found.tokens[row], wanted.tokens[row])
        same += torch.equal(found.parents[row], wanted.parents[row])
    assert same >= 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bits_hang_on_neither_company_nor_threads_nor_earlier_steps(temperature: float) -> None:
    file, plan = eagle3(), Plan(3, 4, 12)
    made, wide = native(file)
    together = Rows(made, wide)
    found = together.tell((0, 1, 2), (0, 0, 0), plan, temperature)
    target().use_threads(3)
    alone = Rows(made, wide)
    assert found is not None
    for row in range(3):
        alone.tell((row,), (0,), Plan(0, 0, 0), stop=2)
        steps = [*range(2, min(LENGTHS[row], 12)), *range(12, LENGTHS[row], 50)]
        for last, end in pairwise(steps):  # a token or more at a time, some with trees
            grown = Plan(2, 2, 3) if end % 3 else Plan(0, 0, 0)
            alone.tell((row,), (last,), grown, temperature, stop=end)
        seen = steps[-1] if steps else LENGTHS[row] - 1
        again = alone.tell((row,), (seen,), plan, temperature)
        assert again is not None
        assert torch.equal(again.tokens[0], found.tokens[row])
        assert torch.equal(again.parents[0], found.parents[row])
        assert torch.equal(again.score[0], found.score[row])
    target().use_threads(2)
    (one,), (other,) = together.pool.layers, alone.pool.layers
    held = [slot for row in range(3) for slot in together.slots[row][1:]]
    assert torch.equal(one.k[held], other.k[held]) and torch.equal(one.v[held], other.v[held])


@pytest.mark.parametrize("kind", ["plain", "eagle1"])
def test_text_is_the_same_with_and_without(kind: str) -> None:
    made, _ = native(HEADS[kind]())
    plain = engine(model=target())  # type: ignore[arg-type]
    on = engine(
        model=target(),
        draft=made,
        depth=3,
        width=2,
        step_tokens=32,  # type: ignore[arg-type]
    )
    asked = [
        request(prompt, 12, temperature=(0.0, 0.8)[i % 2], seed=i)
        for i, prompt in enumerate(prompts(4, 3, 60, seed=2))
    ]
    alone = [tokens(plain, one.prompt, 12, temperature=(0.0, 0.8)[i % 2], seed=i)
             for i, one in enumerate(asked)]  # fmt: skip
    assert [done.tokens for done in run(on, *asked)] == alone
    drafted = run(on, request(asked[0].prompt, 12))[0]  # from the cache
    assert drafted.tokens == alone[0] and sum(step.drafted for step in drafted.steps) > 10


def test_what_can_not_be_compiled_says_why() -> None:
    file = eagle3()
    two = replace(file, config=replace(file.config, block=replace(file.config.block, layers=2)))
    assert "2 layers" in unfit_head(two, target())
    with pytest.raises(HeadError, match="2 layers"):
        load_native_head(two, target())
    assert unfit_head(file, target()) == ""
