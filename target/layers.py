"""The parts a transformer block is made of: linear maps, norms, attention, gated MLP, block.

Plain classes holding tensors, used by the target and by draft bodies alike. They know shapes and
arithmetic; where weights come from is target/model.py's concern, how attention runs the kernels'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.base import AttentionPlan
from spec_serve.target.rope import Rotation, rotate

Activation = Callable[[Tensor], Tensor]

_LINEAR = torch.ops.mkldnn._linear_pointwise

FEWEST = 4
"""Rows a packed linear is run with at least. oneDNN takes other kernels for 1 to 3 rows, which are
slower than the one for 4 (35 ms against 27 for SmolLM2 at 2 rows) and round differently."""

TIERS = ((8, 1), (16, 2), (64, 4), (128, 8), (256, 16), (512, 32))
"""(up to so many rows, rounded up to a multiple of this) for packed linears; see `tier`."""

COARSEST = 64
"""What more rows than TIERS knows are rounded up to a multiple of."""

WHOLE = 1 << 14
"""Values up to which torch leaves an elementwise operation to one thread (GELU; others twice)."""

EXPECTED = 8
"""Rows the packed layout is chosen for."""


def activation(name: str) -> Activation:
    """The function behind a name of `ACTIVATIONS`."""
    if name == "silu":
        return F.silu
    if name == "gelu":
        return F.gelu
    assert name == "gelu_pytorch_tanh", name
    return lambda x: F.gelu(x, approximate="tanh")


def tier(rows: int) -> int:
    """Rows a packed linear is run with for `rows`.

    oneDNN makes and keeps code for every number of rows and shape of weight it meets (about 1 ms
    and 0.6 MB each), so there must be few. Every row costs as much as any other: small numbers are
    kept as they are.
    """
    if rows < FEWEST:
        return FEWEST if rows else 0
    step = next((step for most, step in TIERS if rows <= most), COARSEST)
    return -(-rows // step) * step


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU has a prepacked linear (oneDNN) worth using.

    bfloat16 only with the processor's own instructions for it: emulated it is slower than float32.
    """
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if dtype != torch.float32 and not (dtype == torch.bfloat16 and native()):
        return False
    try:
        eye = torch.eye(16, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(eye, EXPECTED)
        out = _LINEAR(eye, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return torch.equal(out, eye)


class Linear:
    """y = x W^T + b, W [out, in].

    On a CPU, in float32 and where the processor knows it bfloat16, the weight is held in oneDNN's
    blocked layout and the plain one is given up: up to 8 rows then cost what one costs, and the
    bits of a row's result do not depend on how many others are computed with it (measured with
    AVX-512; F.linear gives 1, 2 and 4 rows different bits). `pack=False` keeps the plain layout.
    """

    __slots__ = ("_dtype", "_packed", "_plain", "bias", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self._dtype = weight.dtype
        self._packed: Tensor | None = None
        self._plain: Tensor | None = weight
        if pack and weight.device.type == "cpu" and can_pack(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED)
            self._plain = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, in] -> [N, out]."""
        if self._packed is not None:
            rows = x.shape[0]
            run = tier(rows)
            if run != rows:
                x = F.pad(x, (0, 0, 0, run - rows))
            y: Tensor = _LINEAR(x, self._packed, self.bias, "none", [], "")
            return y if run == rows else y[:rows]
        assert self._plain is not None
        return F.linear(x, self._plain, self.bias)

    def rows(self, rows: int) -> int:
        """Rows that `rows` are computed as; given that many, no copy is made to pad them."""
        return rows if self._packed is None else tier(rows)

    @property
    def weight(self) -> Tensor:
        """[out, in] in the plain layout; a copy where the weight is packed."""
        if self._packed is not None:
            return self._packed.to_dense()
        assert self._plain is not None
        return self._plain

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        values = self.outputs * (self.inputs + (self.bias is not None))
        return values * self._dtype.itemsize


class RMSNorm:
    """x / rms(x) * w over the last axis, statistics in float32.

    zero_centred: multiply by 1 + w, in float32 (Gemma); otherwise the normed value is cast to x's
    dtype before it is multiplied.
    """

    __slots__ = ("eps", "shape", "weight", "widen")

    def __init__(self, weight: Tensor, eps: float, zero_centred: bool = False) -> None:
        self.weight = weight.float() + 1.0 if zero_centred else weight
        self.eps = eps
        self.shape = tuple(weight.shape)
        self.widen = weight.dtype != torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., H] -> the same shape and dtype."""
        if not self.widen:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        if self.weight.dtype == torch.float32:
            return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x.float(), self.shape, None, self.eps).to(x.dtype) * self.weight


class SelfAttention(Protocol):
    """Attention of one layer: `Attention`, or over latents (target/latent.py)."""

    @property
    def window(self) -> int | None: ...

    def rows(self, rows: int) -> int:
        """Rows that `rows` are computed as, see `Linear.rows`."""
        ...

    def __call__(self, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """x: [N or more, in] -> as many rows of H; writes K and V of the N nodes to `kv`."""
        ...


class FeedForward(Protocol):
    """What follows attention in a layer: `MLP`, or a mixture of experts (target/experts.py)."""

    def __call__(self, x: Tensor, nodes: int | None = None) -> Tensor:
        """x: [N or more, H] -> as many rows of H. nodes: N, rows beyond are padding; None = all."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of one layer; `qkv` maps to query heads, then K heads, then V heads."""

    qkv: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def rows(self, rows: int) -> int:
        """See `SelfAttention`."""
        return self.qkv.rows(rows)

    def __call__(self, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """x: [N or more, in] -> as many rows of H; writes K and V of the N nodes to `kv`.

        N is rotation's; rows beyond are padding.
        """
        heads, kv_heads = self.heads, self.kv_heads
        nodes, rows = rotation[0].shape[0], x.shape[0]
        y = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        if nodes != rows:
            y = y[:nodes]
        qk, v = y.split_with_sizes([heads + kv_heads, kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes([heads, kv_heads], 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = rotate(qk, rotation).split_with_sizes([heads, kv_heads], 1)
        mixed = plan.attend(
            q, k, v, kv, scale=self.scale, window=self.window, softcap=self.softcap
        )  # [N, heads, D]
        mixed = mixed.reshape(nodes, heads * self.head_dim)
        if nodes != rows:
            mixed = F.pad(mixed, (0, 0, 0, rows - nodes))
        return self.out(mixed)


def gated(y: Tensor, act: Activation) -> Tensor:
    """act(gate) * up of y [N, 2I], the gate's outputs first: [N, I].

    Vectorised functions round otherwise than what computes the rest beside whole vectors. Were a
    row parted between threads, its bits would depend on how many rows there are.
    """
    gate, up = y.chunk(2, -1)
    rows, inner = gate.shape
    threads = torch.get_num_threads()
    most = max(1, WHOLE // inner)
    if rows <= most or threads == 1 or y.device.type != "cpu":
        return act(gate).mul_(up)
    made = torch.empty_like(gate, memory_format=torch.contiguous_format)
    # As many rows for each thread, if there are enough for all of them; then few at a time.
    even = rows - rows % threads
    first = even if even * inner >= 2 * WHOLE * threads else most
    for start, stop in pairwise((0, *range(first, rows, most), rows)):
        part = slice(start, stop)
        torch.mul(act(gate[part]), up[part], out=made[part])
    return made


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x)); `gate_up` maps to the gate's outputs, then the up's."""

    gate_up: Linear
    down: Linear
    act: Activation

    def __call__(self, x: Tensor, nodes: int | None = None) -> Tensor:
        """x: [N, H] -> [N, H]; padding is computed like all other rows."""
        return self.down(gated(self.gate_up(x), self.act))


@dataclass(frozen=True, slots=True)
class Block:
    """A pre-norm decoder layer; the two after-norms are Gemma's."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: FeedForward
    after_attention: RMSNorm | None = None
    after_mlp: RMSNorm | None = None

    def __call__(self, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """Residual stream x [N, H] -> [N, H]; x itself is left as it is (it may be tapped).

        Rows beyond rotation's are padding.
        """
        mixed = self.attention(self.attention_norm(x), rotation, kv, plan)
        x = x + (mixed if self.after_attention is None else self.after_attention(mixed))
        made = self.mlp(self.mlp_norm(x), rotation[0].shape[0])
        return x.add_(made if self.after_mlp is None else self.after_mlp(made))
