"""A head that exists as the start of a run: read in any layout, taken apart for training.

Only the plain form of EAGLE-3 with one layer can be trained further here; others are refused by
name. Knows roles of tensors and sizes; the layouts are draft/eagle3.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.head_file import HeadError, HeadFile
from spec_serve.draft.train.head import EagleHead, HeadShape
from spec_serve.draft.train.unroll import Example
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Weights

_ROLES = (
    ("midlayer.input_layernorm.", "embed_norm."),
    ("midlayer.hidden_norm.", "feature_norm."),
    ("midlayer.", "layers.0."),
    ("fc.", "fuse."),
)


@dataclass(frozen=True, slots=True)
class Start:
    """A head's sizes, its target ids [D], and its tensors under the names training uses."""

    shape: HeadShape
    kept: Tensor
    tensors: dict[str, Tensor]


def read_start(head: Weights, target: ModelConfig) -> Start:
    """The head in `head`, to be trained for `target`. HeadError if it can't be."""
    file = read_eagle3(head, target)
    config, block = file.config, file.config.block
    odd = next((said for wrong, said in _unusual(file) if wrong), "")
    if odd:
        raise HeadError(f"adapt: a head with {odd} can't be trained further here")
    kept = file.ids()
    shape = HeadShape(
        hidden=block.hidden,
        intermediate=block.intermediate,
        heads=block.heads,
        kv_heads=block.kv_heads,
        head_dim=block.head_dim,
        vocab=target.vocab,
        draft_vocab=config.draft_vocab,
        taps=config.taps,
        eps=block.eps,
        theta=block.rope.theta,
        max_positions=block.max_context,
    )
    tensors = {}
    for name in EagleHead(shape).named():
        role = name
        for ours, theirs in _ROLES:
            if name.startswith(ours):
                role = name.replace(ours, theirs, 1)
                break
        tensors[name] = file.tensor(role, torch.float32)
    return Start(shape, torch.arange(config.draft_vocab) if kept is None else kept, tensors)


def _unusual(file: HeadFile) -> list[tuple[bool, str]]:
    config, block = file.config, file.config.block
    return [
        (config.format != "eagle3", f"the form of {config.format}"),
        (block.layers != 1, f"{block.layers} layers"),
        (config.normed_residual, "norm_before_residual"),
        (config.feedback == "normed", "norm_output"),
        (config.final_norm, "a feature behind the final norm"),
        (file.has("fuse_norm.weight") or file.has("fuse_norms.0.weight"), "norms before fc"),
        (block.qkv_bias or block.qk_norm or block.o_bias or block.mlp_bias, "biases or norms on q"),
        (file.has("embed_tokens.weight"), "an embedding of its own"),
        (not file.has("lm_head.weight"), "the target's output rows"),
    ]


def usual_size(examples: Sequence[Example]) -> Tensor:
    """Root mean square of each channel of the features where heads are trained, [T * H]."""
    total, count = torch.zeros(examples[0].taps.shape[1]), 0
    for example in examples:
        part = example.taps[example.first : -2].float()
        total, count = total + part.pow(2).sum(0), count + len(part)
    return (total / max(count, 1)).sqrt().clamp_min(1e-6)
