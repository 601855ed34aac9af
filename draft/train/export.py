"""A trained head as files others read: config.json and model.safetensors.

EAGLE-3 heads in the SpecForge layout, block drafters in z-lab's.
Weights are rounded to bfloat16; the vocabulary's tables keep their integers. A model card is put
beside them from facts the run has measured. Knows names and layout, no training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_serve.draft.train.block import BlockHead, block_config
from spec_serve.draft.train.head import EagleHead, head_config
from spec_serve.draft.train.named import NamedWeights
from spec_serve.draft.train.vocabulary import membership, offsets


def export(head: NamedWeights, kept: Tensor, folder: Path, **more: Any) -> int:
    """Write `head` with the vocabulary `kept` [D] into `folder`; returns bytes of the weights.

    more: further keys of config.json, such as what the head was made for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: held.to(torch.bfloat16).cpu().contiguous() for name, held in head.named().items()
    }
    if isinstance(head, BlockHead):
        vocab = head.shape.plain.vocab
        config: Mapping[str, Any] = block_config(head.shape, torch_dtype="bfloat16", **more)
    else:
        assert isinstance(head, EagleHead), "one of the two kinds there are"
        vocab = head.shape.vocab
        config = head_config(head.shape, torch_dtype="bfloat16", **more)
    tensors["d2t"] = offsets(kept)
    tensors["t2d"] = membership(kept, vocab)
    path = folder / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path.stat().st_size


def model_card(name: str, target: str, facts: Mapping[str, str], notes: str) -> str:
    """The text of a README.md: front matter, a table of facts, notes."""
    rows = "\n".join(f"| {what} | {value} |" for what, value in facts.items())
    return (
        f"---\nlicense: apache-2.0\nbase_model: {target}\ntags: [eagle3, speculative-decoding]\n"
        f"---\n\n# {name}\n\nAn EAGLE-3 head that guesses what {target} says next. It changes no"
        f" text: every guess is checked by the target.\n\n| | |\n|---|---|\n{rows}\n\n{notes}\n"
    )
