"""The head that comes with the package: whole, small enough, and made for the default model."""

from __future__ import annotations

import torch

from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.heads import HEADS
from spec_serve.draft.train.start import read_start
from spec_serve.target.weights import open_checkpoint
from tests.draft.heads import target_config

LIMIT = 25_000_000


def test_the_shipped_head_is_whole() -> None:
    (shipped,) = HEADS
    assert shipped.path.is_dir(), "draft/heads is package data"
    size = sum(file.stat().st_size for file in shipped.path.iterdir())
    assert 10_000_000 < size <= LIMIT
    fingerprint = shipped.target
    target = target_config(
        fingerprint.layers, hidden_size=fingerprint.hidden, vocab_size=fingerprint.vocab,
        intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    )  # fmt: skip
    file = read_eagle3(open_checkpoint(shipped.path), target)
    assert file.config.taps == (2, 15, 27)
    ids = file.ids()
    assert ids is not None and len(ids) == file.config.draft_vocab == 8192
    assert {0, 2} <= set(ids[:8].tolist())  # the ends of answers can be guessed
    start = read_start(open_checkpoint(shipped.path), target)  # it can be trained further
    for name, held in start.tensors.items():
        assert bool(torch.isfinite(held).all()) and float(held.abs().max()) > 0, name
    card = (shipped.path / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "tokens per step" in card
