"""Whether a head and a target belong together, as far as sizes, ids and embeddings can tell.

Speculation is exact whatever a head says, so a wrong one would never show in the text, only in
speed: it is refused here, by name, before it is used. What the numbers can't tell is left to a
trial on text (spec/rehearsal.py). Knows files and tensors; no engine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.head_file import HeadError
from spec_serve.target.config import ModelConfig

PADDING = 1024
"""Rows by which two embeddings of one vocabulary may differ (both are padded, in their own way)."""

SAMPLE = 256
"""Embedding rows compared."""

UNRELATED = 0.2
"""Mean cosine between the rows of two embeddings below which they have nothing in common."""

SAME = 0.999
"""Mean cosine from which one embedding is a copy of the other, rounded differently."""


def check_vocabulary(rows: int, target: ModelConfig, real: int) -> None:
    """Raise HeadError if a head for `rows` token ids can't belong to the target.

    real: ids of the target that mean something; the rest of its rows is padding.
    """
    if rows < real or abs(rows - target.vocab) > PADDING:
        raise HeadError(
            f"vocab_size: the head knows {rows} token ids, the target {real} (with padding"
            f" {target.vocab}); it was made for another model"
        )


def likeness(own: Tensor, target: Tensor) -> float:
    """Mean cosine between rows of a head's embedding and the target's, over a sample of them."""
    rows = min(own.shape[0], target.shape[0])
    at = torch.linspace(0, rows - 1, min(rows, SAMPLE)).long()
    a, b = own[at.to(own.device)].float(), target[at.to(target.device)].float()
    # Rows nobody trained are often zero in both.
    alive = (a.norm(dim=-1) > 0) & (b.norm(dim=-1) > 0)
    if not bool(alive.any()):
        return 1.0
    return float(F.cosine_similarity(a[alive], b[alive], dim=-1).mean())


def check_embedding(own: Tensor, target: Tensor) -> bool:
    """True if a head's embedding is the target's, so that the target's will do.

    Raises HeadError if it has the target's width and was made for another model.
    """
    if own.shape[1] != target.shape[1]:
        return False
    found = likeness(own, target)
    if found < UNRELATED:
        raise HeadError(
            f"embed_tokens.weight: the head's embedding has nothing in common with the target's"
            f" (mean cosine {found:.2f}); it was made for another model"
        )
    return found >= SAME and own.shape[0] <= target.shape[0]
