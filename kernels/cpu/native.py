"""The compiled library, found and described: structures as in csrc/native.h, functions by ctypes.

The package's build compiles it where there is a compiler; without one `load` says why and models
run in torch. Nothing here knows what a model is made of; target/native.py does.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VERSION = 6
ROWS, BLOCK = 16, 32
MOST_GROUP = 16  # query heads per K/V head
MOST_DIM = 256  # of a head
ISAS = ("avx512", "avx2", "i8mm", "dotprod", "neon", "generic")


class NativeUnavailable(RuntimeError):
    """The compiled library is not there, or not for this processor; the message says why."""


class Matrix(Structure):
    """A repacked matrix; see csrc/native.h."""

    _fields_ = [
        ("data", c_void_p), ("bias", c_void_p), ("outputs", c_int32), ("inputs", c_int32),
        ("bits", c_int32), ("subblocks", c_int32), ("minima", c_int32), ("zero", c_int32),
    ]  # fmt: skip


class Stack(Structure):
    """Matrices one below the other."""

    _fields_ = [("parts", POINTER(Matrix)), ("count", c_int32)]


class Layer(Structure):
    """One block's weights; null = the family has none."""

    _fields_ = [
        ("qkv", Stack), ("out", Stack), ("gate_up", Stack), ("down", Stack),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("after_attention", c_void_p),
        ("after_mlp", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("window", c_int32), ("local", c_int32),
    ]  # fmt: skip


class Model(Structure):
    """A whole model."""

    _fields_ = [
        ("layers", POINTER(Layer)), ("count", c_int32), ("hidden", c_int32),
        ("intermediate", c_int32), ("heads", c_int32), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("vocab", c_int32), ("planes", c_int32),
        ("activation", c_int32), ("kv_eight", c_int32), ("eps", c_float),
        ("attention_scale", c_float),
        ("attention_softcap", c_float), ("logit_softcap", c_float), ("embed_scale", c_float),
        ("norm", c_void_p), ("embedding", Matrix), ("head", Stack),
        ("rope", c_void_p), ("local_rope", c_void_p),
    ]  # fmt: skip


class Step(Structure):
    """One forward's inputs and where its outputs go."""

    _fields_ = [
        ("nodes", c_int64), ("rows", c_int64), ("logits", c_int64), ("words", c_int64),
        ("table_stride", c_int64), ("first", c_int64), ("threads", c_int64),
        ("tokens", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("row_of", c_void_p),
        ("ancestors", c_void_p), ("logits_at", c_void_p), ("node_ptr", c_void_p),
        ("twig_ptr", c_void_p), ("twig_slots", c_void_p), ("row_ids", c_void_p),
        ("prefix", c_void_p), ("chain", c_void_p), ("table", c_void_p),
        ("k", c_void_p), ("v", c_void_p), ("taps", c_void_p), ("tap_count", c_int64),
        ("tapped", c_void_p), ("logits_out", c_void_p), ("chosen_out", c_void_p),
        ("limit", c_int64), ("hidden_out", c_void_p),
    ]  # fmt: skip


# ggml type -> (its number, bits, scales per 32, whether it has minima, code of the weight 0).
FORMS: dict[str, tuple[int, int, int, bool, int]] = {
    "Q4_0": (2, 4, 1, False, 8),
    "Q4_1": (3, 4, 1, True, 0),
    "Q5_0": (6, 5, 1, False, 16),
    "Q5_1": (7, 5, 1, True, 0),
    "Q8_0": (8, 8, 1, False, 128),
    "Q4_K": (12, 4, 1, True, 0),
    "Q5_K": (13, 5, 1, True, 0),
    "Q6_K": (14, 6, 2, False, 32),
}
_CODES = {4: 256, 5: 320, 6: 384, 8: 512}


@cache
def load() -> ctypes.CDLL:
    """The library with its functions' types. Raises NativeUnavailable."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        raise NativeUnavailable("not built: the installation found no C++ compiler")
    try:
        made = ctypes.CDLL(str(found[-1]))
        version = made.spec_native_version()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{found[-1].name} can't be loaded: {error}") from error
    if version != VERSION:
        raise NativeUnavailable(f"{found[-1].name} is of another version; install anew")
    made.spec_native_isa.restype = c_char_p
    made.spec_native_isa.argtypes = [c_char_p]
    made.spec_native_pool.restype = c_void_p
    made.spec_native_pool.argtypes = [c_int32]
    made.spec_native_pool_free.argtypes = [c_void_p]
    made.spec_native_pool_free.restype = None
    made.spec_native_runner.restype = c_void_p
    made.spec_native_runner.argtypes = [POINTER(Model), c_char_p, c_void_p]
    made.spec_native_runner_free.argtypes = [c_void_p]
    made.spec_native_runner_free.restype = None
    made.spec_native_forward.argtypes = [c_void_p, POINTER(Step)]
    made.spec_native_linear.argtypes = [
        POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int32, c_char_p, c_void_p,
    ]  # fmt: skip
    made.spec_native_row.argtypes = [POINTER(Matrix), c_int64, c_void_p]
    made.spec_native_row.restype = None
    made.spec_native_repack.argtypes = [
        POINTER(Matrix), c_int32, POINTER(c_uint8), c_int64, c_void_p, c_void_p,
    ]  # fmt: skip
    return made


def isa(wanted: str = "auto") -> str:
    """The instruction set that will be used, "" if `wanted` is not to be had here."""
    return bytes(load().spec_native_isa(wanted.encode())).decode()


class Pool:
    """Threads of the library's own."""

    def __init__(self, threads: int) -> None:
        self.threads = max(threads, 1)
        library = load()
        self.handle = library.spec_native_pool(self.threads)
        self._end = weakref.finalize(self, library.spec_native_pool_free, self.handle)


class Arena:
    """Zeroed memory for many matrices, in large pages where the system has them.

    A step reads all weights once, and with pages of 4 KiB it waits for their addresses: on a Zen 4
    one thread reads 33 GB/s from large pages and 22 GB/s from small ones.
    """

    CHUNK = 32 << 20
    PAGE = 2 << 20  # a large page of x86-64 and of most others

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] zeros at an address that is a multiple of 64; freed with its last user."""
        nbytes = -(-nbytes // 64) * 64
        if nbytes > len(self._free):
            self._free = self._map(-(-nbytes // self.CHUNK) * self.CHUNK)
        taken, self._free = self._free.split_with_sizes([nbytes, len(self._free) - nbytes])
        return taken

    def _map(self, nbytes: int) -> Tensor:
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.zeros(nbytes, dtype=torch.uint8)
        # Private: shared memory gets small pages.
        held = mmap.mmap(-1, nbytes + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            held.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        skip = -whole.data_ptr() % self.PAGE
        return whole[skip : skip + nbytes]


class PackedMatrix:
    """A ggml matrix in the layout of the kernels; `matrix` is what the library reads."""

    def __init__(
        self, kind: str, raw: Tensor, outputs: int, inputs: int, pool: Pool,
        bias: Tensor | None = None, rows: Tensor | None = None, arena: Arena | None = None,
    ) -> None:  # fmt: skip
        """raw: [bytes] uint8, rows of ggml blocks of type `kind`. rows: [outputs] int32, the stored
        row of each output row. ValueError for a type or shape the kernels don't have."""
        refusal = fits(kind, outputs, inputs)
        if refusal:
            raise ValueError(refusal)
        number, bits, subblocks, minima, zero = FORMS[kind]
        groups = -(-outputs // ROWS)
        block = _CODES[bits] + 32 * subblocks + 32 * minima
        # The tail is read ahead by the kernels, never used.
        arena = Arena() if arena is None else arena
        self._data = arena.take(groups * (inputs // BLOCK) * block + 8192)
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(groups * ROWS)
            self._bias[:outputs] = bias
        self.matrix = Matrix(
            self._data.data_ptr(), self._bias.data_ptr() if self._bias is not None else None,
            outputs, inputs, bits, subblocks, int(minima), zero,
        )  # fmt: skip
        raw = raw.contiguous()
        order = None if rows is None else rows.to(torch.int32).contiguous()
        failed = load().spec_native_repack(
            self.matrix, number, ctypes.cast(raw.data_ptr(), POINTER(c_uint8)),
            raw.numel() // outputs, None if order is None else order.data_ptr(), pool.handle,
        )  # fmt: skip
        assert not failed, kind

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._data.numel() + (self._bias.numel() * 4 if self._bias is not None else 0)

    def linear(self, x: Tensor, pool: Pool, isa: str = "auto", planes: int = 2) -> Tensor:
        """x: [N, inputs] float32 -> [N, outputs], for tests and benches.

        planes: of eight bits that an activation is held in, 1 or 2.
        """
        outputs = self.matrix.outputs
        y = torch.empty(len(x), -(-outputs // ROWS) * ROWS)
        x = x.float().contiguous()
        wrong = load().spec_native_linear(
            self.matrix, x.data_ptr(), len(x), y.data_ptr(), planes, isa.encode(), pool.handle
        )
        if wrong:
            raise ValueError(f"isa: {isa!r} is not to be had on this processor")
        return y[:, :outputs]

    def row(self, row: int) -> Tensor:
        """[inputs] float32: one row as the kernels see it."""
        assert 0 <= row < self.matrix.outputs
        out = torch.empty(self.matrix.inputs)
        load().spec_native_row(self.matrix, row, out.data_ptr())
        return out


def fits(kind: str, outputs: int, inputs: int) -> str:
    """Why the kernels can't take such a matrix; "" if they can."""
    if kind not in FORMS:
        return f"{kind}: not a quantisation of the kernels"
    if outputs < 1 or inputs < BLOCK or inputs % BLOCK:
        return f"[{outputs}, {inputs}]: inputs must be a multiple of {BLOCK}"
    return ""
