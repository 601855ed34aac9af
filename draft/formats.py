"""Which format a drafting checkpoint has, told by its tensors, and the drafter made of it.

A table of recognisers, the most particular first; what none of them knows is an ordinary language
model (draft/standalone.py). Names of files and models play no part. Knows the formats' modules;
nothing of how a drafter is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spec_serve.draft.base import Drafter
from spec_serve.draft.block import BlockDrafter, BlockHead
from spec_serve.draft.dflash import is_dflash, read_dflash
from spec_serve.draft.eagle import is_eagle, read_eagle
from spec_serve.draft.eagle3 import is_eagle3, read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead, TargetParts
from spec_serve.draft.head_file import HeadFile
from spec_serve.draft.modules import ModulesDrafter
from spec_serve.draft.native_head import load_native_head, unfit_head
from spec_serve.draft.nextn import is_nextn, read_nextn
from spec_serve.draft.pairing import check_embedding, check_vocabulary
from spec_serve.draft.parallel import ParallelDrafter
from spec_serve.kernels.base import AttentionBackend
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Model, Weights
from spec_serve.target.native import NativeTransformer
from spec_serve.target.weights import Checkpoint, open_checkpoint


@dataclass(frozen=True, slots=True)
class Pairing:
    """What a head is put together with.

    config: the target's. real: ids of it that mean something. target: the target, once loaded.
    parts: what the head borrows, called with whether the target's own head is needed. taps:
    boundaries to read, None = what the file says.
    """

    config: ModelConfig
    real: int
    target: Callable[[], Model]
    parts: Callable[[bool], TargetParts]
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    taps: tuple[int, ...] | None = None


Made = Callable[[], Drafter]
"""Loads a head whose files were checked, once its target is there."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of head: recognised by the names of its tensors; `prepare` checks everything that is
    cheap to check and raises HeadError, what it returns reads the weights."""

    name: str
    fits: Callable[[Sequence[str]], bool]
    prepare: Callable[[Weights, Pairing], Made]


def _loaded(file: HeadFile, pairing: Pairing) -> FeatureHead:
    parts = pairing.parts(not file.has("lm_head.weight"))
    return FeatureHead(_borrowing(file, parts, pairing), parts, pairing.dtype, pairing.device)


def _borrowing(file: HeadFile, parts: TargetParts, pairing: Pairing) -> HeadFile:
    """The file without an embedding that is only a copy of the target's."""
    role = "embed_tokens.weight"
    if not file.has(role):
        return file
    if not check_embedding(file.tensor(role, pairing.dtype), parts.embedding):
        return file
    names = {kept: name for kept, name in file.names.items() if kept != role}
    return replace(file, names=names)


def _feature(file: HeadFile, pairing: Pairing) -> Made:
    check_vocabulary(file.config.block.vocab, pairing.config, pairing.real)

    def made() -> Drafter:
        target = pairing.target()
        if isinstance(target, NativeTransformer) and not unfit_head(file, target):
            lean = file
            if file.has("embed_tokens.weight"):
                lean = _borrowing(file, pairing.parts(False), pairing)
            return load_native_head(lean, target)
        kind = FeatureDrafter if file.config.mask_token is None else ParallelDrafter
        return kind(_loaded(file, pairing), pairing.attention)

    return made


def _eagle(weights: Weights, pairing: Pairing) -> Made:
    return _feature(read_eagle(weights, pairing.config, pairing.taps), pairing)


def _eagle3(weights: Weights, pairing: Pairing) -> Made:
    return _feature(read_eagle3(weights, pairing.config, pairing.taps), pairing)


def _dflash(weights: Weights, pairing: Pairing) -> Made:
    file = read_dflash(weights, pairing.config, pairing.taps)
    check_vocabulary(file.config.block.vocab, pairing.config, pairing.real)

    def made() -> Drafter:
        parts = pairing.parts(not file.has("lm_head.weight"))
        lean = _borrowing(file, parts, pairing)
        head = BlockHead(lean, parts, pairing.dtype, pairing.device)
        return BlockDrafter(head, pairing.attention)

    return made


def prepare_nextn(weights: Weights, pairing: Pairing) -> Made:
    """NEXTN modules, which may lie in the target's own checkpoint; HeadError if there are none."""
    files = read_nextn(weights, pairing.config)
    if len(files) == 1:
        return _feature(files[0], pairing)
    for file in files:
        check_vocabulary(file.config.block.vocab, pairing.config, pairing.real)
    return lambda: ModulesDrafter([_loaded(file, pairing) for file in files], pairing.attention)


FORMATS: tuple[Format, ...] = (
    Format("eagle3", is_eagle3, _eagle3),
    Format("eagle", is_eagle, _eagle),
    Format("nextn", is_nextn, prepare_nextn),
    Format("dflash", is_dflash, _dflash),
)


def recognise(weights: Weights) -> Format | None:
    """The format of a drafter's checkpoint; None = an ordinary language model, or unknown."""
    names = list(weights.names())
    # A whole model may bring NEXTN modules; named as a draft, the model itself is meant.
    whole = "model.layers.0.input_layernorm.weight" in names and "model.norm.weight" in names
    for entry in FORMATS:
        if entry.fits(names) and not (whole and entry.name == "nextn"):
            return entry
    return None


def open_draft(path: Path) -> Checkpoint:
    """A drafter's checkpoint: a directory, a .gguf, or the .safetensors beside a config.json."""
    if path.suffix == ".safetensors" and path.is_file():
        path = path.parent
    return open_checkpoint(path)
