"""GGUF files of mixtures of experts: the same tiny models from memory and from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from spec_serve.target.config import ModelConfig
from spec_serve.target.model import load_model
from spec_serve.target.weights import CheckpointError, open_checkpoint
from tests.target.test_weights import Kind, assert_same, write_gguf
from tests.tiny import MemoryCheckpoint, tiny_checkpoint

STACKED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
STACKED |= {"w1": "gate", "w3": "up", "w2": "down"}
SPARSE = {"llama": "mixtral", "qwen2moe": "qwen2-moe", "qwen3moe": "qwen3-moe"}


def stacked(checkpoint: MemoryCheckpoint, apart: bool) -> dict[str, Tensor]:
    """Tensors under a converter's names where they belong to mixtures; apart: experts are not
    stacked, as in early files."""
    made: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for name, held in checkpoint.tensors.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        block, _, below = rest.partition(".")
        part = below.removesuffix(".weight").split(".")
        if part[0] == "gate":
            made[f"blk.{layer}.ffn_gate_inp.weight"] = held
        elif part[0] == "shared_expert_gate":
            made[f"blk.{layer}.ffn_gate_inp_shexp.weight"] = held[0]
        elif part[0] == "shared_expert":
            made[f"blk.{layer}.ffn_{STACKED[part[1]]}_shexp.weight"] = held
        elif part[0] == "experts" and apart:
            made[f"blk.{layer}.ffn_{STACKED[part[2]]}.{part[1]}.weight"] = held
        elif part[0] == "experts":
            parts.setdefault(f"blk.{layer}.ffn_{STACKED[part[2]]}_exps.weight", []).append(held)
        else:
            made[name] = held
    return made | {name: torch.stack(held) for name, held in parts.items()}


@pytest.mark.parametrize(("arch", "apart"), [*((a, False) for a in SPARSE), ("llama", True)])
def test_a_gguf_of_experts_holds_the_model_it_was_made_from(
    arch: str, apart: bool, tmp_path: Path
) -> None:
    """Experts stacked in one tensor, a layer without them where there can be one."""
    dense: dict[str, Any] = {} if arch == "llama" else {"mlp_only_layers": [1]}
    memory = tiny_checkpoint(SPARSE[arch], **dense)
    config = memory.config
    numbers = {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }

    def edit(writer: gguf.GGUFWriter) -> None:
        for key, number in numbers.items():
            if number:
                writer.add_uint32(f"{arch}.{key}", number)

    path = tmp_path / "x.gguf"
    file = MemoryCheckpoint(config, stacked(memory, apart))
    assert_same(write_gguf(tmp_path / "q.gguf", file, arch, Kind.Q8_0, edit), memory, atol=0.02)
    assert_same(write_gguf(path, file, arch, edit=edit), memory)
    opened = open_checkpoint(path)
    ours = ModelConfig.from_checkpoint_config(config)
    assert ModelConfig.from_checkpoint_config(opened.config).experts == ours.experts
    load_model(opened)
    opened.close()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_gating_func", 2, "llama.expert_gating_func: 2 is not supported"),
        ("llama.expert_group_count", 4, "llama.expert_group_count: 4 is not supported"),
        ("llama.expert_count", 4, "5, 64, 128.*4 experts are expected"),
    ],
)
def test_what_would_route_otherwise_is_refused(
    key: str, value: int, message: str, tmp_path: Path
) -> None:
    memory = tiny_checkpoint("mixtral", hidden_size=128, intermediate_size=64)
    file = MemoryCheckpoint(memory.config, stacked(memory, apart=False))

    def edit(writer: gguf.GGUFWriter) -> None:
        numbers = {"llama.expert_count": 5, "llama.expert_used_count": 2, key: value}
        for name, number in numbers.items():
            writer.add_uint32(name, number)

    path = write_gguf(tmp_path / "x.gguf", file, "llama", edit=edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
