"""The device drafter an operator asked for: found, checked against the target, loaded, tried.

What can be told from names, sizes and vocabularies is checked before the target's weights are
read; a head is tried on built-in prompts at the end. Which formats there are is draft/formats.py's
knowledge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spec_serve.draft.base import Drafter
from spec_serve.draft.formats import Made, Pairing, open_draft, prepare_nextn, recognise
from spec_serve.draft.head import TargetParts
from spec_serve.draft.heads import find_head, head_for, installed
from spec_serve.draft.make import DraftChoice, parse_taps
from spec_serve.draft.standalone import StandaloneDrafter, common_vocabulary, real_vocabulary
from spec_serve.kernels.base import AttentionBackend, pick_backend
from spec_serve.spec.assemble import EngineOptions, attention_for
from spec_serve.spec.rehearsal import PROMPTS, Rehearsal, rehearse
from spec_serve.target.config import ModelConfig
from spec_serve.target.hub import resolve
from spec_serve.target.model import Model, Transformer
from spec_serve.target.tokenizer import Tokenizer, load_tokenizer
from spec_serve.target.weights import Checkpoint, open_checkpoint

log = logging.getLogger("spec_serve.draft")

LoadModel = Callable[[Path], Model]


@dataclass(slots=True)
class _Loaded:
    """The target, once it is there; heads borrow from it."""

    model: Model | None = None


class DraftLoader:
    """Everything about the drafter of one engine, in the order it can be known.

    Making one raises ValueError for a drafter that can't belong to the target.
    """

    def __init__(
        self, choice: DraftChoice, options: EngineOptions, path: Path, tokenizer: Tokenizer,
        device: torch.device, dtype: torch.dtype, shown: bool,
    ) -> None:  # fmt: skip
        self._options, self._tokenizer, self._device = options, tokenizer, device
        self._dtype, self._path = dtype, path
        self._loaded = _Loaded()
        self._head: Made | None = None
        self._model_path: Path | None = None
        self._opened: Checkpoint | None = None
        self._vocabulary = 0
        if choice.nextn:
            self._opened = open_checkpoint(path)
            self._head = prepare_nextn(self._opened, self._pairing())
        elif choice.model is not None:
            found = find_head(choice.model) or resolve(choice.model, progress=shown)
            self._opened = open_draft(found)
            entry = recognise(self._opened)
            if entry is not None:
                if (found / "tokenizer.json").is_file():
                    common_vocabulary(tokenizer, load_tokenizer(found))
                self._head = entry.prepare(self._opened, self._pairing())
            else:
                self._opened.close()
                self._vocabulary = common_vocabulary(tokenizer, load_tokenizer(found))
                self._model_path = found
        else:
            self._hint()
        if self._head is None and options.draft_taps:
            raise ValueError("draft-taps: the draft is no head that reads the target's layers")

    def _hint(self) -> None:
        """Say so if there is a head for this target that was not asked for."""
        if not installed():
            return
        checkpoint = open_checkpoint(self._path)
        try:
            head = head_for(checkpoint)
        finally:
            checkpoint.close()
        if head is not None:
            log.info("draft: a head for this model is installed: --draft lookup+%s", head.name)

    def _pairing(self) -> Pairing:
        checkpoint = open_checkpoint(self._path)
        try:
            config = ModelConfig.from_checkpoint_config(checkpoint.config)
        finally:
            checkpoint.close()
        return Pairing(
            config=config,
            real=min(real_vocabulary(self._tokenizer), config.vocab),
            target=self._target,
            parts=self._parts,
            attention=self._attention(),
            dtype=self._dtype,
            device=self._device,
            taps=parse_taps(self._options.draft_taps),
        )

    def _attention(self) -> AttentionBackend:
        return pick_backend(self._device, "auto")

    def _target(self) -> Model:
        assert self._loaded.model is not None, "heads are made when the target is there"
        return self._loaded.model

    def _parts(self, head: bool) -> TargetParts:
        model = self._target()
        if isinstance(model, Transformer):
            return TargetParts.of(model)
        checkpoint = open_checkpoint(self._path)
        try:
            return TargetParts.read(checkpoint, self._dtype, head)
        finally:
            checkpoint.close()

    def drafter(self, target: Model, load: LoadModel) -> Drafter | None:
        """The drafter for the loaded target; load: how a whole model is loaded."""
        self._loaded.model = target
        try:
            if self._head is not None:
                return self._head()
            if self._model_path is None:
                return None
            model = load(self._model_path)
            attention = attention_for(model, self._options.attention)
            return StandaloneDrafter(model, attention, self._vocabulary)
        finally:
            self._loaded.model = None
            if self._opened is not None:
                self._opened.close()

    def rehearse(self, target: Model, drafter: Drafter) -> Rehearsal:
        """Try the drafter on built-in prompts; one that guesses by chance is told of loudly."""
        found = rehearse(
            target, drafter, prompts_of(self._tokenizer), self._options,
            vocab_size=real_vocabulary(self._tokenizer),
        )  # fmt: skip
        if found.by_chance:
            log.warning("draft: %s", found.told(drafter.name))
        else:
            log.info("draft: %s", found.told(drafter.name))
        return found


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """The built-in prompts as this model is asked."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in PROMPTS]
    return [tokenizer.render_chat([{"role": "user", "content": text}]) for text in PROMPTS]
