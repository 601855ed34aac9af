"""Block drafters in training: against the one that drafts, and a run from answers to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.block import BlockDrafter
from spec_serve.draft.block import BlockHead as DraftingHead
from spec_serve.draft.dflash import read_dflash
from spec_serve.draft.formats import recognise
from spec_serve.draft.train.answers import Answer, add_answers
from spec_serve.draft.train.block import (
    BlockHead,
    BlockShape,
    block_lengths,
    block_shape,
    learn,
)
from spec_serve.draft.train.capture import Capturer
from spec_serve.draft.train.export import export
from spec_serve.draft.train.head import HeadShape
from spec_serve.draft.train.lesson import acceptance
from spec_serve.draft.train.loop import Told, TrainOptions
from spec_serve.draft.train.session import Folder, Ready, capture, prepare, read_log, train
from spec_serve.draft.train.unroll import Example, Teacher
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.model import Transformer
from spec_serve.target.weights import open_checkpoint
from tests.draft.heads import INNER, NH, NK, D, H, V, bound, parts, propose, seen_of, target_config
from tests.tiny import tiny_checkpoint, tiny_model

TAPS = (2, 4, 5)
KEPT = torch.arange(1, 65)
PLAIN = HeadShape(H, INNER, NH, NK, D, V, len(KEPT), TAPS, 1e-6, 10000.0, 2048)
SHAPE = BlockShape(PLAIN, 2, 4, V - 1)
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(8))
ROWS = torch.randn(len(KEPT), H, generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module")
def head() -> BlockHead:
    made = BlockHead(SHAPE)
    chance = torch.Generator().manual_seed(5)
    for held in made.weights.values():
        drawn = torch.randn(held.shape, generator=chance)
        held.data = drawn * held.shape[-1] ** -0.5 if held.ndim == 2 else 1 + 0.1 * drawn
        held.data = held.data.bfloat16().float()  # so that rounding on export loses nothing
    made.scale.fill_(2.0)
    return made


def example(seed: int, n: int = 12, first: int = 4) -> Example:
    chance = torch.Generator().manual_seed(seed)
    return Example(
        tokens=torch.randint(0, V, (n,), generator=chance),
        taps=torch.randn(n, 3 * H, generator=chance).half(),
        hidden=torch.randn(n, H, generator=chance).half(),
        known=torch.rand(n, generator=chance) > 0.2,
        first=first,
    )


def test_what_is_trained_is_what_drafts(head: BlockHead, tmp_path: Path) -> None:
    export(head, KEPT, tmp_path)
    found = recognise(open_checkpoint(tmp_path))
    assert found is not None and found.name == "dflash"
    file = read_dflash(open_checkpoint(tmp_path), target_config())
    assert file.config.taps == TAPS and file.config.mask_token == V - 1
    drafter = BlockDrafter(DraftingHead(file, parts(EMBEDDING, EMBEDDING)), TorchAttention())
    given = example(1)
    guesses = []
    for newest in range(given.first + 1, len(given.tokens) - 1):
        bound(drafter)
        told = given.tokens[: newest + 1].tolist()
        trees = propose(drafter, seen_of(told, given.taps[:newest].float()), 3, 1, 3)
        guesses.append(trees.tokens[0].tolist())
    # An answer that goes as the drafter guesses at one place is accepted there, and as trained.
    for i, told in enumerate(guesses):
        newest = given.first + 1 + i
        tokens = given.tokens.clone()
        tail = tokens[newest + 1 : newest + 4]
        tail.copy_(torch.tensor(told[: len(tail)]))
        with torch.no_grad():
            lengths = block_lengths(head, EMBEDDING, KEPT, _with(given, tokens), 3, most=3)
        assert int(lengths[i]) == len(tail)


def _with(given: Example, tokens: torch.Tensor) -> Example:
    return Example(tokens, given.taps, given.hidden, given.known, given.first)


def test_losses_by_place(head: BlockHead) -> None:
    both = [example(2), example(3, n=9, first=2)]
    teacher = Teacher(ROWS)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        found = learn(head, EMBEDDING, teacher, both, chance, 0)
        # Two blocks each; those of the first sequence alone, one by one.
        again = torch.Generator().manual_seed(1)
        total = torch.zeros(3)
        for given in both:
            last = len(given.tokens) - 1
            span = last - 1 - given.first
            for anchor in (torch.randperm(span, generator=again)[:2] + given.first + 1).tolist():
                assert -(-span // 3) == 2
                seen = torch.full((1, 4), V - 1)
                seen[0, 0] = given.tokens[anchor]
                context = head.context(given.taps[:anchor])  # nothing behind it can matter
                out = head.run([(context, torch.tensor([anchor]), F.embedding(seen, EMBEDDING))])
                logits = head.logits(out)[0, 1:].log_softmax(-1)
                for place in range(min(3, last - anchor)):
                    wanted = teacher(given.hidden[anchor + place][None])[0]
                    cross = -(wanted * logits[place]).sum()
                    total[place] += cross * bool(given.known[anchor + place])
    torch.testing.assert_close(found.loss, total, atol=1e-3, rtol=1e-5)
    assert found.pairs.tolist() == [4, 4, 4]


def test_shapes_that_guess_nothing_are_refused() -> None:
    assert block_shape(PLAIN, 1, 2, {V - 1, V - 3}).mask == V - 2
    with pytest.raises(ValueError, match="block-layers"):
        block_shape(PLAIN, 0, 2, ())
    with pytest.raises(ValueError, match="unrolled"):
        block_shape(PLAIN, 1, 1, ())


LAYERS = 6
OPTIONS = TrainOptions(pairs=2000, unrolled=3, batch_pairs=64, learning_rate=1e-2, half=False)


@torch.inference_mode()
def said(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """What the tiny target answers, greedily."""
    attention, pool = TorchAttention(), KVPool(model.kv_specs, 64, 1, 64, model.device)
    pool.assign(0, 0, range(1, 64))
    tokens, done = list(prompt), 0
    for _ in range(count):
        part = tokens[done:]
        slots = range(done + 1, len(tokens) + 1)
        batch = build_batch([Twig(0, done, chain(part), slots, 0)], model.device)
        out = model.forward(batch, pool.layers, attention.plan(batch, pool.table), ())
        done = len(tokens)
        tokens.append(int(out.logits[-1].argmax()))
    return tokens[len(prompt) :]


def ready(folder: Folder) -> Ready:
    return prepare(
        folder, tiny_checkpoint("llama", 3, num_hidden_layers=LAYERS), OPTIONS, taps=(2, 3, 3),
        draft_vocab=128, ends=[298, 299], block_layers=1, candidates=0,
    )  # fmt: skip


def noting(steps: list[Told]) -> Callable[[Told, object], bool]:
    def note(told: Told, found: object) -> bool:
        steps.append(told)
        return True

    return note


def test_a_run(tmp_path: Path) -> None:
    whole, broken = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    model = tiny_model("llama", 3, num_hidden_layers=LAYERS)
    answers = []
    for i in range(8):
        prompt = [7 + i, 40 + i, 90 + 3 * i]
        answers.append(Answer(i, "test", 0.0, i >= 7, prompt, said(model, prompt, 18)))
    capturer = Capturer(model, TorchAttention(), (2, 3, 3), 64)
    for folder in (whole, broken):
        folder.root.mkdir()
        add_answers(folder.answers, answers)
        capture(folder, capturer, 1 << 30)
    steps: list[Told] = []
    first = ready(whole)
    train(whole, first, 1000, noting(steps))
    assert sum(steps[-1].loss) < 0.7 * sum(steps[0].loss)
    assert read_log(whole)[0]["depths"][0] < 0.05  # it began with nothing to say
    # Of what it was trained on it guesses far more than one token in 128.
    examples = first.corpus.examples()
    assert acceptance(first.lesson, examples, 3).depths[0] > 0.1

    train(broken, ready(broken), 1000, lambda told, found: told.place.step < 5)
    going_on = ready(broken)
    rest: list[Told] = []
    train(broken, going_on, 1000, noting(rest))
    assert [told.loss for told in rest] == [told.loss for told in steps[5:]]
    for name, held in first.lesson.head.named().items():
        assert torch.equal(held, going_on.lesson.head.named()[name]), name
    with pytest.raises(ValueError, match="another kind"):
        prepare(
            broken, tiny_checkpoint("llama", 3, num_hidden_layers=LAYERS), OPTIONS,
            taps=(2, 3, 3), draft_vocab=128, ends=[298, 299],
        )  # fmt: skip
