"""Heads as files: every layout is recognised by its contents, what is wrong is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_serve.draft import heads
from spec_serve.draft.base import Drafter
from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.formats import Pairing, open_draft, prepare_nextn, recognise
from spec_serve.draft.head import TargetParts
from spec_serve.draft.head_file import HeadError
from spec_serve.draft.make import DraftChoice, parse_draft, parse_taps
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.convert import convert_to_safetensors
from spec_serve.target.model import Transformer, expected_tensors, load_model
from tests.draft.heads import (
    CONFIG,
    PROMPT,
    SAMPLED,
    H,
    V,
    bound,
    checkpoint,
    eagle3_shapes,
    eagle_shapes,
    features,
    fill,
    nextn_shapes,
    propose,
    reduced,
    seen_of,
    target_config,
)

L = 8


@pytest.fixture(scope="module")
def target() -> Transformer:
    """A random target whose embedding is the one heads of seed 3492 hold."""
    raw = {**CONFIG, "num_hidden_layers": L}
    shapes = dict(expected_tensors(target_config(L), "model."))
    tensors = fill({**shapes, "lm_head.weight": (V, H)}, 11)
    tensors["model.embed_tokens.weight"] = head3()["embed_tokens.weight"]
    return load_model(checkpoint(raw, tensors), torch.float32)


def head3() -> dict[str, Tensor]:
    return fill(eagle3_shapes(32), 3492) | reduced(3493)


def pairing(target: Transformer, real: int = V) -> Pairing:
    return Pairing(
        target.config, real, lambda: target, lambda head: TargetParts.of(target),
        TorchAttention(), torch.float32, torch.device("cpu"),
    )  # fmt: skip


def written(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    held = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
    save_file({n: x.contiguous() for n, x in held.items()}, path / "model.safetensors")
    return path


def loaded(path: Path, target: Transformer, real: int = V) -> Drafter:
    opened = open_draft(path)
    found = recognise(opened)
    assert found is not None
    return found.prepare(opened, pairing(target, real))()


def guesses(drafter: Drafter, seed: int = 3494, width: int = 3 * H) -> list[int]:
    bound(drafter)
    return (
        propose(drafter, seen_of((*PROMPT, SAMPLED), features(seed, width)), 4, 1, 4)
        .tokens[0]
        .tolist()
    )


EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32}
CHAIN = [45, 43, 77, 40]


def renamed(tensors: Mapping[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        out[name] = tensor
    return out


def speculators(**more: Any) -> dict[str, Any]:
    layer = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "draft_vocab_size": 32, "norm_before_residual": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "transformer_layer_config": layer,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}, **more,
    }  # fmt: skip


LAYOUTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "eagle's own": (lambda t: t, {"draft_vocab_size": 32}),
    "specforge": (lambda t: {n: x for n, x in t.items() if "embed" not in n}, EAGLE3),
    "layers.0": (lambda t: renamed(t, ("midlayer.", "layers.0.")), EAGLE3),
    "model.": (lambda t: {f"model.{n}": x for n, x in t.items()}, EAGLE3),
    "model.layers.0": (
        lambda t: {f"model.{n}": x for n, x in renamed(t, ("midlayer.", "layers.0.")).items()},
        EAGLE3,
    ),
    "draft_model.": (lambda t: {f"draft_model.{n}": x for n, x in t.items()}, EAGLE3),
    "no t2d": (lambda t: {n: x for n, x in t.items() if n != "t2d"}, EAGLE3),
    "nested ids": (
        lambda t: t,
        {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
    ),
    "speculators": (lambda t: renamed(t, ("midlayer.", "layers.0.")), speculators()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_eagle3(name: str, target: Transformer, tmp_path: Path) -> None:
    change, config = LAYOUTS[name]
    drafter = loaded(written(tmp_path, change(head3()), **config), target)
    assert drafter.name == "eagle3" and drafter.taps == (2, 4, 5)
    assert isinstance(drafter, FeatureDrafter)
    assert drafter.head._embedding is target.embedding, "a copy is not kept"
    assert guesses(drafter) == CHAIN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_a_single_file(
    dtype: torch.dtype, target: Transformer, tmp_path: Path
) -> None:
    path = written(tmp_path, head3(), dtype, **EAGLE3)
    assert guesses(loaded(path / "model.safetensors", target)) == CHAIN


def test_bin_files_by_way_of_convert(target: Transformer, tmp_path: Path) -> None:
    path = written(tmp_path / "bin", head3(), **EAGLE3)
    (path / "model.safetensors").unlink()
    torch.save(head3(), path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="models convert"):
        open_draft(path)
    convert_to_safetensors(path, tmp_path / "converted")
    assert guesses(loaded(tmp_path / "converted", target)) == CHAIN


def test_a_fused_norm_per_third_and_a_narrow_head(target: Transformer, tmp_path: Path) -> None:
    narrow = {**eagle3_shapes(32), "fc.weight": (H, 3 * H)}
    config = {**EAGLE3, "target_hidden_size": 2 * H}
    with pytest.raises(HeadError, match="target_hidden_size.*128.*64"):
        loaded(written(tmp_path / "a", fill(narrow, 1) | reduced(3493), **config), target)
    wide = target_config(L, hidden_size=2 * H)
    shapes = {**narrow, "fc.weight": (H, 6 * H)}
    held = checkpoint({**CONFIG, **config}, fill(shapes, 1) | reduced(3493))
    assert read_eagle3(held, wide).config.target_hidden == 2 * H
    del shapes["embed_tokens.weight"]
    held = checkpoint({**CONFIG, **config}, fill(shapes, 1) | reduced(3493))
    with pytest.raises(HeadError, match=r"embed_tokens\.weight: missing"):
        read_eagle3(held, wide)


@pytest.mark.parametrize("family", ["eagle", "mimo", "deepseek"])
def test_the_other_formats_are_told_apart(family: str, target: Transformer, tmp_path: Path) -> None:
    shapes = eagle_shapes(True) if family == "eagle" else nextn_shapes(family, layers=L)
    tensors = fill(shapes, 1)
    for name in [name for name in tensors if "embed_tokens" in name]:
        tensors[name] = target.embedding
    drafter = loaded(written(tmp_path, tensors, num_hidden_layers=L), target)
    assert drafter.name == ("eagle" if family == "eagle" else "nextn")
    assert drafter.taps == (L,)
    assert isinstance(drafter, FeatureDrafter)
    assert len(guesses(drafter, 2, H)) == 4


def absolute(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"d2t": tensors["d2t"] + torch.arange(32)}


def unlike(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = tensors["t2d"].roll(1)
    return tensors | {"t2d": kept}


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: x for n, x in tensors.items() if n != name}


def foreign(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"embed_tokens.weight": fill({"embed_tokens.weight": (V, H)}, 99)[
        "embed_tokens.weight"
    ]}  # fmt: skip


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = {
    "absolute ids": (absolute, EAGLE3, "d2t: .*absolute ids"),
    "t2d says otherwise": (unlike, EAGLE3, "d2t: names other ids than t2d"),
    "no d2t": (without("d2t"), EAGLE3, "d2t: missing"),
    "no head": (without("lm_head.weight"), EAGLE3, "lm_head.weight: missing"),
    "no norm": (without("norm.weight"), EAGLE3, "norm.weight: missing"),
    "a layer's matrix": (
        without("midlayer.mlp.up_proj.weight"), EAGLE3, "layers.0.mlp.up_proj.weight: missing",
    ),
    "taps outside": (
        lambda t: t,
        {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}},
        "boundary 9 is outside 0..8",
    ),
    "another width": (lambda t: t, {**EAGLE3, "hidden_size": 32}, "target_hidden_size"),
    "another vocabulary": (lambda t: t, {**EAGLE3, "vocab_size": 9000}, "embed_tokens|vocab_size"),
    "a smaller vocabulary": (
        without("embed_tokens.weight"), {**EAGLE3, "vocab_size": 64}, "d2t|t2d|vocab_size",
    ),
    "another model's embedding": (foreign, EAGLE3, "nothing in common with the target's"),
    "speculators without its key": (
        lambda t: renamed(t, ("midlayer.", "layers.0.")),
        {k: v for k, v in speculators().items() if k != "norm_before_residual"},
        "norm_before_residual: missing",
    ),
    "a shape": (
        lambda t: t | {"fc.weight": torch.zeros(H, H)}, EAGLE3, r"fc.weight: has shape \[64, 64\]",
    ),
    "RoPE of another kind": (
        lambda t: t, {**EAGLE3, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type: 'dynamic'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(name: str, target: Transformer, tmp_path: Path) -> None:
    change, config, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        loaded(written(tmp_path, change(head3()), **config), target)


def test_norms_before_fc_of_eagle_1_are_refused(target: Transformer, tmp_path: Path) -> None:
    tensors = fill({**eagle_shapes(True), "embedding_layernorm.weight": (H,)}, 1)
    with pytest.raises(HeadError, match="HASS"):
        loaded(written(tmp_path / "hass", tensors), target)
    with pytest.raises(HeadError, match="fc.bias: missing"):
        loaded(written(tmp_path / "bias", fill(eagle_shapes(False), 1), bias=True), target)


def test_a_count_of_modules_without_their_tensors(target: Transformer) -> None:
    raw = {**CONFIG, "num_hidden_layers": L, "num_nextn_predict_layers": 1}
    held = checkpoint(raw, fill(dict(expected_tensors(target_config(L), "model.")), 1))
    with pytest.raises(HeadError, match="speaks of 1, but the checkpoint holds no NEXTN"):
        prepare_nextn(held, pairing(target))


@pytest.mark.parametrize("part", ["mlp.experts.0.up_proj.weight", "self_attn.kv_a_proj.weight"])
def test_blocks_that_are_not_dense_are_refused(part: str, target: Transformer) -> None:
    tensors = fill(nextn_shapes("deepseek", layers=L), 1)
    tensors[f"model.layers.{L}.{part}"] = torch.zeros(2, 2)
    held = checkpoint({**CONFIG, "num_hidden_layers": L}, tensors)
    with pytest.raises(HeadError, match="not supported"):
        prepare_nextn(held, pairing(target))


def test_a_padded_vocabulary_passes(target: Transformer, tmp_path: Path) -> None:
    shapes = {**eagle3_shapes(128), "embed_tokens.weight": (128, H)}
    tensors = fill(shapes, 5716)
    tensors["embed_tokens.weight"][:V] = target.embedding
    config = {**EAGLE3, "draft_vocab_size": 128, "vocab_size": 128}
    drafter = loaded(written(tmp_path, tensors, **config), target, real=90)
    assert max(guesses(drafter)) < V


def test_a_whole_model_is_no_head() -> None:
    tensors = fill(dict(expected_tensors(target_config(2), "model.")), 1)
    tensors |= fill(nextn_shapes("mimo"), 2)
    assert recognise(checkpoint(CONFIG, tensors)) is None


def test_the_text_of_draft() -> None:
    assert parse_draft("nextn") == DraftChoice(False, None, True)
    assert parse_draft("lookup+nextn") == DraftChoice(True, None, True)
    assert parse_draft("some/head+lookup") == DraftChoice(True, "some/head")
    for text in ("nextn+a", "a+nextn", "a+b"):
        with pytest.raises(ValueError, match="one can be used"):
            parse_draft(text)
    assert parse_taps("") is None and parse_taps("2,15,27") == (2, 15, 27)
    with pytest.raises(ValueError, match="draft-taps"):
        parse_taps("2,x")


def test_a_head_in_the_package_is_found_by_name_and_by_its_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(heads, "FOLDER", tmp_path)
    (shipped,) = heads.HEADS
    assert heads.find_head(shipped.name) is None and heads.find_head("no-such-head") is None
    shipped.path.mkdir()
    (shipped.path / "config.json").write_text("{}")
    assert heads.find_head(shipped.name.upper()) == tmp_path / "smollm2-135m-instruct"
    config = {
        **CONFIG, "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    }  # fmt: skip
    norm = torch.ones(576)
    assert heads.head_for(checkpoint(config, {"model.norm.weight": norm})) is None
    norm[: len(shipped.target.norm)] = torch.tensor(shipped.target.norm)
    assert heads.head_for(checkpoint(config, {"model.norm.weight": norm})) is shipped
    config["num_hidden_layers"] = 32
    assert heads.head_for(checkpoint(config, {"model.norm.weight": norm})) is None
