"""A drafter's trial before it serves: good heads pass, others are told of, with what would mend."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head_file import HeadError
from spec_serve.draft.standalone import VocabularyMismatch
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.load import build_engine
from spec_serve.spec.rehearsal import Rehearsal, rehearse
from spec_serve.spec.request import Request, Sampling, Speculation, Stopping
from tests.draft.algebraic import EYE, NONE, PROMPT, eagle, eagle3, target
from tests.draft.heads import CONFIG, H, eagle3_shapes, fill, nextn_shapes
from tests.tiny import VOCAB, write_tiny_model_dir

OPTIONS = EngineOptions("tiny")


def tried(drafter: FeatureDrafter) -> Rehearsal:
    return rehearse(target(), drafter, [PROMPT, PROMPT[::-1], PROMPT[1:]], OPTIONS)


def test_a_head_that_knows_its_target_passes() -> None:
    found = tried(eagle3(1))
    assert found.right == found.guesses > 20 and not found.by_chance
    assert "first guesses right" in found.told("eagle3")


def test_one_that_does_not_is_told_of() -> None:
    found = tried(eagle(NONE, EYE))
    assert found.right == 0 and found.by_chance
    assert "no better than chance (0 of" in found.told("eagle")


class Elsewhere(FeatureDrafter):
    """Sees nothing unless it reads one boundary further than its file says."""

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        assert seen.taps is not None
        if self.taps != (3, 5, 6):
            seen.taps = torch.zeros_like(seen.taps)
        return super().propose(seen, grants, plan, noise)


def test_layers_counted_the_other_way_are_found_out() -> None:
    made = eagle3(1)
    assert made.taps == (2, 4, 5)
    found = tried(Elsewhere(made.head, made._attention))
    assert found.by_chance and "--draft-taps 3,5,6" in found.told("eagle3")


def test_an_engine_tries_the_head_it_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_model_dir(tmp_path / "model")
    shapes = {**eagle3_shapes(VOCAB), "fc.weight": (H, 3 * H)}
    del shapes["embed_tokens.weight"]
    head = tmp_path / "head"
    head.mkdir()
    raw = {**CONFIG, "vocab_size": VOCAB, "draft_vocab_size": VOCAB}
    (head / "config.json").write_text(json.dumps(raw))
    save_file(fill(shapes, 5), head / "model.safetensors")
    threads = torch.get_num_threads()
    options = EngineOptions(
        str(model), f"lookup+{head}", draft_taps="1,2,3", kv_tokens=512, max_rows=2, max_nodes=4
    )
    with caplog.at_level(logging.WARNING, logger="spec_serve.draft"):
        engine, _ = build_engine(options)
    torch.set_num_threads(threads)
    assert "eagle3 guesses no better than chance" in caplog.text
    assert "no better than chance" in engine.info.draft_told
    assert "eagle3" in engine.info.sources
    asked = Request("a", list(range(9)), Sampling(), Stopping(max_tokens=5))
    (done,) = engine.generate([asked])
    assert len(done.tokens) == 5
    with pytest.raises(ValueError, match="draft-taps"):
        build_engine(EngineOptions(str(model), str(model), draft_taps="1,2,3"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (head / name).write_bytes((model / name).read_bytes())
    told = json.loads((head / "tokenizer.json").read_text())
    vocab = told["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (head / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(VocabularyMismatch, match="differs from the target's at 2 of"):
        build_engine(options)


def test_nextn_is_found_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    model = write_tiny_model_dir(tmp_path / "model", "qwen2", architectures=["MiMoForCausalLM"])
    options = EngineOptions(str(model), "nextn", kv_tokens=512, max_rows=2, max_nodes=4)
    with pytest.raises(HeadError, match="holds no NEXTN"):
        build_engine(options)
    file = model / "model.safetensors"
    own = {name: shape for name, shape in nextn_shapes("mimo").items() if "mtp_layers" in name}
    save_file({**load_file(file), **fill(own, 5)}, file)
    asked = Request("a", list(range(9)), Sampling(), Stopping(max_tokens=6), Speculation("max"))
    threads = torch.get_num_threads()
    said = []
    for speculation in ("auto", "off"):
        engine, _ = build_engine(replace(options, speculation=speculation))
        said.append(engine.generate([asked])[0].tokens)
        on = speculation == "auto"
        assert (engine.stats().drafted > 0) == on == ("nextn" in engine.info.sources)
    torch.set_num_threads(threads)
    assert said[0] == said[1] and len(said[0]) == 6
