"""The compiled drafting phase: structures as in csrc/draft.h, and the thing that runs them.

A `Grower` computes draft K/V of what became certain and grows a tree per row in one call. Knows
pointers; not where a head's weights come from (draft/native_head.py).
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache

from spec_serve.kernels.cpu.native import Matrix, Pool, Stack, load


class Draft(Structure):
    """A head's weights and sizes; empty stacks and nulls are what its format has not."""

    _fields_ = [
        *((name, Stack) for name in (
            "fuse", "join", "q", "kv", "out", "gate_up", "down", "head",
        )),
        *((name, c_void_p) for name in (
            "fuse_norm", "fuse_norms", "embed_norm", "feature_norm", "attention_norm", "mlp_norm",
            "norm", "q_norm", "k_norm",
        )),
        ("embedding", Matrix), ("rope", c_void_p), ("ids", c_void_p),
        *((name, c_int32) for name in (
            "taps", "tap_width", "hidden", "intermediate", "heads", "kv_heads", "head_dim",
            "vocab", "planes", "activation", "hidden_first", "normed_residual", "normed_output",
        )),
        ("eps", c_float), ("attention_scale", c_float), ("logit_softcap", c_float),
    ]  # fmt: skip


class DraftStep(Structure):
    """One drafting phase's inputs and where its trees go."""

    _fields_ = [
        *((name, c_int64) for name in ("nodes", "rows", "threads", "table_stride")),
        *((name, c_void_p) for name in (
            "tokens", "positions", "slots", "node_ptr", "features", "last", "length", "row_ids",
            "table", "k", "v",
        )),
        *((name, c_int64) for name in ("depth", "width", "kept", "grants_stride")),
        *((name, c_void_p) for name in (
            "grants", "seeds", "temperature", "tokens_out", "parents_out", "scores_out",
        )),
    ]  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    made = load()
    made.spec_native_grower.restype = c_void_p
    made.spec_native_grower.argtypes = [POINTER(Draft), c_char_p, c_void_p]
    made.spec_native_grower_free.argtypes = [c_void_p]
    made.spec_native_grower_free.restype = None
    made.spec_native_grow.argtypes = [c_void_p, POINTER(DraftStep)]
    return made


class Grower:
    """Runs a head on the threads of `pool`; what `draft` points to stays the caller's."""

    def __init__(self, draft: Draft, isa: str, pool: Pool) -> None:
        self.pool = pool
        handle = _library().spec_native_grower(draft, isa.encode(), pool.handle)
        assert handle, isa
        self._handle = handle
        self._end = weakref.finalize(self, _library().spec_native_grower_free, handle)

    def run(self, step: DraftStep) -> None:
        """Raises MemoryError."""
        if _library().spec_native_grow(self._handle, step):
            raise MemoryError("no memory for a step of the compiled draft")
