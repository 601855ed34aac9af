"""Heads that come with the package: their short names, and the target each was made for.

A target is known by its sizes and by a few weights of its final norm, which every container holds
unrounded enough; so a head is offered for the model itself, whatever its file is called. Knows the
package's folders; nothing of how heads are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spec_serve.target.config import ModelConfig
from spec_serve.target.model import PREFIXES, Weights

FOLDER = Path(__file__).parent / "heads"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A target: layers, hidden size, rows of the embedding, the final norm's first weights."""

    layers: int
    hidden: int
    vocab: int
    norm: tuple[float, ...]

    def fits(self, weights: Weights) -> bool:
        """Whether a checkpoint is that target, in whatever precision."""
        config = ModelConfig.from_checkpoint_config(weights.config)
        if (config.layers, config.hidden, config.vocab) != (self.layers, self.hidden, self.vocab):
            return False
        held = set(weights.names())
        name = next((p + "norm.weight" for p in PREFIXES if p + "norm.weight" in held), None)
        if name is None:
            return False
        found = weights.tensor(name, torch.float32)[: len(self.norm)]
        return torch.allclose(found, torch.tensor(self.norm), rtol=0.01, atol=1e-3)


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A head in the package. model: the short name of its target."""

    name: str
    folder: str
    model: str
    target: Fingerprint

    @property
    def path(self) -> Path:
        """Its directory; there if it is installed."""
        return FOLDER / self.folder


HEADS: tuple[ShippedHead, ...] = (
    ShippedHead(
        "smollm2-eagle3",
        "smollm2-135m-instruct",
        "smollm2-135m-instruct",
        Fingerprint(30, 576, 49152, (1.7578, 1.8203, 1.7813, 1.6016, 1.7422, 1.7188, 1.8281, 1.75)),
    ),
)


def installed() -> list[ShippedHead]:
    """The heads that are there."""
    return [head for head in HEADS if (head.path / "config.json").is_file()]


def find_head(name: str) -> Path | None:
    """The directory of a head of that short name, if there is one installed."""
    return next((head.path for head in installed() if head.name == name.lower()), None)


def head_for(weights: Weights) -> ShippedHead | None:
    """The installed head made for the target in `weights`, or None."""
    return next((head for head in installed() if head.target.fits(weights)), None)
