"""Drawing tokens from logits in Triton: two launches and a small one per kind of row.

`draw` is for rows without filters (and greedy ones): stretches of the vocabulary in parallel.
`draw_filtered` is for rows with top-k, top-p or min-p: one program a row, no sort and no copy of
the logits. Both equal `spec.sampling.choose` on edited logits; penalties and bias, which touch few
cells, are edited before. Nothing is read back.
"""

import torch
from torch import Tensor

from spec_serve.kernels import draw_programs as programs
from spec_serve.kernels.tree_attention import power

_BLOCK = 2048
# Of this many tokens each is compared with sixteen pivots at once.
_SEARCH = 512

Masks = tuple[Tensor, Tensor]
"""Index among the masks of each row [K], -1 = none, and bits of allowed ids [Q, W] int64."""


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    masks: Masks | None = None,
) -> Tensor:
    """One token per row [K] int64: arg-max of the scaled logits plus noise, at 0 of the logits.

    logits: [K, V] of any float dtype. temperature: [K] float64. seeds, positions: [K] int64, the
    positions of the tokens to be drawn.
    """
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    assert logits.stride(1) == 1
    which, bits = _masks(masks, seeds)
    block = min(power(vocab), _BLOCK)
    blocks = -(-vocab // block)
    tops, values = torch.empty((2, rows, blocks), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    for drawing in (False, True):
        programs.best_of_block[(rows, blocks)](
            logits, bits, which, tops, temperature.to(torch.float32), seeds, positions, values,
            tokens, vocab, bits.shape[1], logits.stride(0), blocks, DRAW=drawing, BLOCK=block,
            BLOCKS=power(blocks), num_warps=4,
        )  # fmt: skip
    programs.best_of_row[(rows,)](values, tokens, out, blocks, BLOCKS=power(blocks), num_warps=1)
    return out


def draw_filtered(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    masks: Masks | None = None,
) -> Tensor:
    """The same among the tokens that survive the filters; all temperatures are above 0.

    top_k: [K] int64, 0 = off. top_p, min_p: [K] float64.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    assert logits.stride(1) == 1
    which, bits = _masks(masks, seeds)
    programs.draw_filtered[(rows,)](
        logits, bits, which, temperature.to(torch.float32), seeds, positions, top_k, top_p, min_p,
        out, vocab, bits.shape[1], logits.stride(0), BLOCK=min(power(vocab), _SEARCH), num_warps=8,
    )  # fmt: skip
    return out


def _masks(masks: Masks | None, seeds: Tensor) -> Masks:
    """Masks or, without any, tensors that say so."""
    if masks is not None:
        assert masks[1].is_contiguous()
        return masks
    return torch.full_like(seeds, -1), seeds.new_zeros((1, 1))
