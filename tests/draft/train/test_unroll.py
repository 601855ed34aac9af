"""Training's arithmetic against plain loops, and against the head that drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead
from spec_serve.draft.train.acceptance import chain_lengths, measure
from spec_serve.draft.train.export import export
from spec_serve.draft.train.head import EagleHead, HeadShape
from spec_serve.draft.train.unroll import Example, Teacher, unroll
from spec_serve.draft.train.vocabulary import choose, membership, offsets
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.weights import open_checkpoint
from tests.draft.heads import INNER, NH, NK, D, H, V, bound, parts, propose, seen_of, target_config

TAPS = (2, 4, 5)
KEPT = torch.arange(1, 65)
N, FIRST, STEPS = 12, 4, 3


@pytest.fixture(scope="module")
def head() -> EagleHead:
    made = EagleHead(HeadShape(H, INNER, NH, NK, D, V, len(KEPT), TAPS, 1e-6, 10000.0, 2048))
    chance = torch.Generator().manual_seed(5)
    for held in made.weights.values():
        drawn = torch.randn(held.shape, generator=chance)
        held.data = drawn * held.shape[-1] ** -0.5 if held.ndim == 2 else 1 + 0.1 * drawn
    made.scale.copy_(torch.rand(len(made.scale), generator=chance) + 0.5)
    return made


def example(seed: int, n: int = N, first: int = FIRST) -> Example:
    chance = torch.Generator().manual_seed(seed)
    return Example(
        tokens=torch.randint(0, V, (n,), generator=chance),
        taps=torch.randn(n, 3 * H, generator=chance).half(),
        hidden=torch.randn(n, H, generator=chance).half(),
        known=torch.rand(n, generator=chance) > 0.2,
        first=first,
    )


EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(8))
ROWS = torch.randn(len(KEPT), H, generator=torch.Generator().manual_seed(9))


def by_hand(head: EagleHead, given: Example) -> list[float]:
    """Loss per step: every chain apart, key after key, as drafting would have them."""
    shape, losses = head.shape, []
    fused = head.fuse(given.taps.float())
    for step in range(STEPS):
        total = 0.0
        for begun in range(given.first, len(given.tokens) - 2 - step):
            out, keys, values = fused[0], [], []
            for pair in range(begun + step + 1):
                feature = fused[pair] if pair <= begun else out
                at = torch.tensor([pair])
                read = head.inputs(EMBEDDING[given.tokens[pair + 1]][None], feature[None])
                key, value = head.keys(read, at)
                keys.append(key[0])
                values.append(value[0])
                query = head.queries(read, at)[0]  # [heads, D]
                mixed = []
                for i in range(shape.heads):
                    group = i // (shape.heads // shape.kv_heads)
                    k = torch.stack(keys)[:, group]
                    share = (k @ query[i] * shape.head_dim**-0.5).softmax(0)
                    mixed.append(share @ torch.stack(values)[:, group])
                out = head.finish(feature[None], torch.stack(mixed)[None])[0]
            wanted = F.linear(given.hidden[pair + 1].float(), ROWS).softmax(-1)
            cross = -(wanted * head.logits(out[None])[0].log_softmax(-1)).sum()
            total += float(cross) * bool(given.known[pair + 1])
        losses.append(total)
    return losses


def test_unrolled_steps_are_what_a_plain_loop_finds(head: EagleHead) -> None:
    both = [example(1), example(2, n=9, first=2)]
    with torch.no_grad():
        found = unroll(head, EMBEDDING, Teacher(ROWS), both, STEPS)
        wanted = torch.tensor([by_hand(head, one) for one in both]).sum(0)
    torch.testing.assert_close(found.loss, wanted, atol=1e-3, rtol=1e-5)
    assert found.pairs.tolist() == [6 + 5, 5 + 4, 4 + 3]
    known = [one.known[1 + one.first : -1] for one in both]
    assert found.counted.tolist() == [sum(int(k[s:].sum()) for k in known) for s in range(STEPS)]


def test_all_ids_as_candidates_change_nothing(head: EagleHead) -> None:
    batch = [example(3)]
    with torch.no_grad():
        plain = unroll(head, EMBEDDING, Teacher(ROWS), batch, STEPS)
        whole = unroll(head, EMBEDDING, Teacher(ROWS, len(KEPT)), batch, STEPS)
        teacher = Teacher(ROWS, 48)
        drawn = torch.stack(
            [unroll(head, EMBEDDING, teacher, batch, STEPS, salt).loss for salt in range(40)]
        )
    torch.testing.assert_close(whole.loss, plain.loss, atol=1e-3, rtol=1e-4)
    # A sample is weighed up to the whole: near it on average, never the same.
    torch.testing.assert_close(drawn.mean(0), plain.loss, atol=0, rtol=0.02)
    assert drawn.std(0).min() > 0


@pytest.fixture(scope="module")
def drafter(head: EagleHead, tmp_path_factory: pytest.TempPathFactory) -> FeatureDrafter:
    """The same head exported, read back and run as an engine does."""
    folder: Path = tmp_path_factory.mktemp("head")
    for held in head.weights.values():  # so that rounding on export loses nothing
        held.data = held.data.bfloat16().float()
    head.scale.fill_(2.0)
    export(head, KEPT, folder)
    file = read_eagle3(open_checkpoint(folder), target_config())
    assert file.config.taps == TAPS
    return FeatureDrafter(FeatureHead(file, parts(EMBEDDING)), TorchAttention())


def test_chains_are_those_of_the_head_that_drafts(head: EagleHead, drafter: FeatureDrafter) -> None:
    given = example(4)
    depth = 4
    for place in range(FIRST, N - 2):
        known = given.tokens[: place + 2]
        bound(drafter)
        seen = seen_of(known.tolist(), given.taps[: place + 1].float())
        guesses = propose(drafter, seen, depth, 1, depth).tokens[0].tolist()
        # An answer that goes on as guessed: all are right, and with a wrong one after two, two.
        tokens = torch.cat((known, torch.tensor(guesses)))
        follows = Example(
            tokens, torch.cat((given.taps[: place + 1], torch.zeros(depth + 1, 3 * H).half())),
            torch.zeros(len(tokens), H), torch.ones(len(tokens), dtype=torch.bool), place,
        )  # fmt: skip
        with torch.no_grad():
            assert int(chain_lengths(head, EMBEDDING, KEPT, follows, depth)[0]) == depth
            follows.tokens[place + 4] += 1
            assert int(chain_lengths(head, EMBEDDING, KEPT, follows, depth)[0]) == 2


def test_tokens_per_step_count_each_token_once(
    head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = torch.tensor([2, 0, 0, 1, 0, 3])

    def fixed(*_: object) -> Tensor:
        return lengths

    monkeypatch.setattr("spec_serve.draft.train.acceptance.chain_lengths", fixed)
    found = measure(head, EMBEDDING, KEPT, [example(1)], depth=3)
    # Steps begin at places 0, 3 and 5: 3, 2 and the last one token that is left.
    assert found.per_step == pytest.approx(6 / 3)
    assert found.depths == pytest.approx((3 / 6, 2 / 6, 1 / 6))


def test_vocabulary_holds_what_occurs_most() -> None:
    kept = choose([([7, 7, 9], 1), ([30], 5), ([2], 1)], 5, 50, always=[40])
    assert kept.tolist() == [2, 7, 9, 30, 40]
    assert choose([([7], 1)], 4, 50, [40]).tolist() == [0, 1, 7, 40]
    assert (offsets(kept) + torch.arange(5)).tolist() == kept.tolist()
    assert membership(kept, 50).nonzero().flatten().tolist() == kept.tolist()
    with pytest.raises(ValueError, match="draft-vocab"):
        choose([], 51, 50, [])
