"""Heads that read hidden states, as compiled code beside a compiled target: FeatureDrafter's twin.

A head's matrices are quantised when it is loaded; a drafting phase, from the certain pairs' K/V to
the ranked trees, is one call. The equations are draft/head.py's and the growth is draft/grow.py's,
with which the trees agree but for rounding. Knows roles of tensors; no formats and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.head_file import HeadConfig, HeadError, HeadFile
from spec_serve.kernels.cpu import native
from spec_serve.kernels.cpu.drafting import Draft, DraftStep, Grower
from spec_serve.kernels.cpu.native import Arena, PackedMatrix
from spec_serve.kernels.cpu.quantise import QUANTISERS
from spec_serve.target.native import ACTIVATIONS, NativeTransformer, rotation_table

# With these a trained head of SmolLM2 is as often right as with 16 bits of activations; with q4_0
# it yields 5 % fewer tokens per step.
QUANTISED, ACTIVATION_BITS = "q8_0", 8
MOST_WIDTH = 64
LAYER = "layers.0."
_HELD = (
    "tokens", "positions", "slots", "node_ptr", "features", "last", "length", "row_ids", "grants",
    "seeds", "temperature", "tokens_out", "parents_out", "scores_out",
)  # fmt: skip


@runtime_checkable
class Keyed(Protocol):
    """Noise that says what it is made of; compiled code can then make it.

    seeds: [B] int64. temperature: [B] float64, 0 = greedy.
    """

    @property
    def seeds(self) -> Tensor: ...
    @property
    def temperature(self) -> Tensor: ...


def unfit_head(file: HeadFile, target: NativeTransformer) -> str:
    """Why a head can't run as compiled code; "" if it can."""
    config, block = file.config, file.config.block
    if block.layers != 1:
        return f"a head of {block.layers} layers"
    if block.latent is not None or block.experts is not None:
        return "latent attention or a mixture of experts"
    if config.gated or config.mask_token is not None:
        return f"a head of format {config.format}, with {'gates' if config.gated else 'a mask'}"
    if config.rotary not in (0, block.head_dim):
        return f"rotation of {config.rotary} of {block.head_dim} channels"
    group, rest = divmod(block.heads, block.kv_heads)
    if rest or group > native.MOST_GROUP:
        return f"{block.heads} query heads over {block.kv_heads} K/V heads"
    if block.head_dim % 16 or block.head_dim > native.MOST_DIM:
        return f"heads of {block.head_dim}"
    wide = len(config.taps) * config.target_hidden
    for inputs in (block.hidden, block.intermediate, block.heads * block.head_dim, wide):
        if inputs % native.BLOCK:
            return f"matrices of {inputs} inputs"
    if block.zero_centred or (config.final_norm and len(config.taps) != 1):
        return "norms of another kind"
    own = file.has("embed_tokens.weight")
    if not own and target.config.hidden != block.hidden:
        return "no embedding of its width"
    return ""


class _Parts:
    """Reads, quantises and keeps a head's tensors by role."""

    def __init__(self, file: HeadFile, target: NativeTransformer, kind: str) -> None:
        self._file, self._target, self._kind = file, target, kind.upper()
        self._arena = Arena()
        self.kept: list[object] = []
        self.nbytes = 0

    def matrix(self, role: str) -> native.Matrix:
        """A packed matrix, with its bias if it has one."""
        weight = self._file.tensor(f"{role}.weight", torch.float32)
        bias = f"{role}.bias"
        held = self._file.tensor(bias, torch.float32) if self._file.has(bias) else None
        outputs, inputs = weight.shape
        made = PackedMatrix(
            self._kind, QUANTISERS[self._kind](weight), outputs, inputs, self._target.pool, held,
            arena=self._arena,
        )  # fmt: skip
        self.kept.append(made)
        self.nbytes += made.nbytes
        return made.matrix

    def stack(self, *roles: str) -> native.Stack:
        """Matrices one below the other; empty where the file has not the first."""
        if not self._file.has(f"{roles[0]}.weight"):
            return native.Stack()
        array = (native.Matrix * len(roles))(*(self.matrix(role) for role in roles))
        self.kept.append(array)
        return native.Stack(array, len(roles))

    def vector(self, *roles: str) -> int | None:
        """Address of norm weights one behind the other; None where the file has not the first."""
        if not self._file.has(roles[0]):
            return None
        return self.hold(torch.cat([self._file.tensor(r, torch.float32).view(-1) for r in roles]))

    def hold(self, tensor: Tensor) -> int:
        """Address of a tensor that is kept."""
        self.kept.append(tensor)
        self.nbytes += tensor.numel() * tensor.element_size()
        return tensor.data_ptr()


class NativeHead:
    """Drafts with a compiled head that reads `taps` of a compiled target."""

    def __init__(
        self, file: HeadFile, target: NativeTransformer, quantize: str, activations: int,
        name: str | None = None,
    ) -> None:  # fmt: skip
        """quantize: how matrices are held. activations: bits they are rounded to, 8 or 16."""
        if reason := unfit_head(file, target):
            raise HeadError(f"draft: can't be compiled: {reason}")
        config = self.config = file.config
        block = config.block
        self.name = name or config.format
        self.taps: tuple[int, ...] = config.taps
        self.kv_specs: tuple[KVSpec, ...] = (KVSpec(block.kv_heads, block.head_dim, torch.float16),)
        self._target = target
        parts = _Parts(file, target, quantize)
        self._draft = _filled(file, target, parts, activations)
        self._kept = parts.kept
        self.nbytes = parts.nbytes
        self._grower = Grower(self._draft, target.isa, target.pool)
        self._step = DraftStep()
        self._rope = torch.empty(0, 0)
        self._layers: Sequence[LayerKV] = ()
        self._table: Tensor = torch.zeros(0, 0, dtype=torch.int64)

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """The pool's tensors of this head's layer and its table."""
        (kv,) = layers
        assert kv.k.dtype == torch.float16 and kv.k.is_contiguous()
        self._layers, self._table = layers, table

    def _reach(self, positions: int) -> None:
        if positions > len(self._rope):
            block = self.config.block
            count = max(positions, 2 * len(self._rope), 512)
            self._rope = rotation_table(block.rope, block.head_dim, count)
            self._draft.rope = self._rope.data_ptr()

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py. Noise that is not `Keyed` is taken for none."""
        batch, step = seen.batch, self._step
        rows = batch.rows
        width = min(plan.width, self._draft.vocab, MOST_WIDTH)
        growing = plan.nodes > 0 and plan.depth > 0
        lengths = seen.length.tolist()
        assert seen.taps is not None and min(lengths) > 1, "a newest token has a feature"
        assert seen.taps.dtype == torch.float32
        self._reach(max(lengths) + plan.depth)
        if self._grower.pool is not self._target.pool:  # the target's threads were changed
            self._grower = Grower(self._draft, self._target.isa, self._target.pool)
        held = [
            batch.tokens, batch.positions, batch.slots, batch.node_ptr, seen.taps, seen.last,
            seen.length, batch.row_ids,
        ]  # fmt: skip
        kept = 0
        if growing:
            candidates = width + (plan.depth - 1) * width * width
            kept = min(plan.nodes, candidates)
            if isinstance(noise, Keyed):
                seeds, temperature = noise.seeds, noise.temperature
            else:
                seeds = torch.zeros(rows, dtype=torch.int64)
                temperature = torch.zeros(rows, dtype=torch.float64)
            tokens = torch.empty(rows, kept, dtype=torch.int64)
            parents = torch.empty(rows, kept, dtype=torch.int64)
            scores = torch.empty(rows, kept)
            held += [grants, seeds, temperature, tokens, parents, scores]
        held = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in held]
        for name, tensor in zip(_HELD, held, strict=False):  # what only growing needs comes last
            setattr(step, name, tensor.data_ptr())
        (kv,) = self._layers
        step.k, step.v, step.table = kv.k.data_ptr(), kv.v.data_ptr(), self._table.data_ptr()
        step.table_stride, step.grants_stride = self._table.stride(0), grants.shape[1]
        step.nodes, step.rows, step.kept = len(batch), rows, kept
        step.depth, step.width = plan.depth if growing else 0, width
        step.threads = self._target.pace.using
        self._grower.run(step)
        if not growing:
            return None
        return Trees(tokens, parents, scores, torch.full((rows,), kept))


def _filled(file: HeadFile, target: NativeTransformer, parts: _Parts, activations: int) -> Draft:
    """The head as the library reads it, but for the rotation table."""
    config: HeadConfig = file.config
    block, model = config.block, target.raw
    made = Draft()
    made.fuse, made.join = parts.stack("fuse"), parts.stack("join")
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    made.q = parts.stack(attention + "q_proj")
    made.kv = parts.stack(attention + "k_proj", attention + "v_proj")
    made.out = parts.stack(attention + "o_proj")
    made.gate_up = parts.stack(mlp + "gate_proj", mlp + "up_proj")
    made.down = parts.stack(mlp + "down_proj")
    made.head, made.vocab = parts.stack("lm_head"), config.draft_vocab
    if not made.head.count:
        made.head, made.logit_softcap = model.head, model.logit_softcap
        made.vocab = min(target.config.vocab, block.vocab)
    ids = file.ids()
    if ids is None:
        made.vocab = min(made.vocab, target.config.vocab)
    else:
        if int(ids[-1]) >= target.config.vocab:
            raise HeadError(
                f"d2t: reaches id {int(ids[-1])}, the target has {target.config.vocab} tokens;"
                " the head was made for another model"
            )
        padded = torch.zeros(-(-len(ids) // native.ROWS) * native.ROWS, dtype=torch.int32)
        padded[: len(ids)] = ids
        made.ids = parts.hold(padded)
    own = file.has("embed_tokens.weight")
    made.embedding = parts.matrix("embed_tokens") if own else model.embedding
    made.fuse_norm = model.norm if config.final_norm else parts.vector("fuse_norm.weight")
    made.fuse_norms = parts.vector(*(f"fuse_norms.{i}.weight" for i in range(len(config.taps))))
    made.embed_norm = parts.vector("embed_norm.weight")
    made.feature_norm = parts.vector("feature_norm.weight")
    made.attention_norm = parts.vector(LAYER + "input_layernorm.weight")
    made.mlp_norm = parts.vector(LAYER + "post_attention_layernorm.weight")
    made.norm = parts.vector("norm.weight")
    made.q_norm = parts.vector(attention + "q_norm.weight")
    made.k_norm = parts.vector(attention + "k_norm.weight")
    made.taps, made.tap_width = len(config.taps), config.target_hidden
    made.hidden, made.intermediate = block.hidden, block.intermediate
    made.heads, made.kv_heads, made.head_dim = block.heads, block.kv_heads, block.head_dim
    made.planes, made.activation = activations // 8, ACTIVATIONS[block.activation]
    made.hidden_first = int(config.hidden_first)
    made.normed_residual = int(config.normed_residual)
    made.normed_output = int(config.feedback == "normed")
    made.eps, made.attention_scale = block.eps, block.attention_scale
    return made


def load_native_head(
    file: HeadFile,
    target: NativeTransformer,
    quantize: str = QUANTISED,
    activations: int = ACTIVATION_BITS,
    name: str | None = None,
) -> NativeHead:
    """The head of `file` beside its target. Raises HeadError with the reason (`unfit_head`)."""
    return NativeHead(file, target, quantize, activations, name)
