"""Compiles every Triton program for a GPU that need not be there, and says what each takes.

The interpreter runs programs, but never types or compiles them; this does, down to machine code, on
any machine that Triton is installed on. Registers spilled and shared memory are what limits how
fast a program can be. Knows programs by name; runs none.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spec_serve.kernels import (
    attention_programs,
    draw_programs,
    fused_programs,
    grouped_programs,
    quantised_linear_programs,
)

# Types of parameters by name; what is in none of them is a 32-bit integer.
NAMES = {
    "*i64": "node_ptr twig_ptr twig_slots prefix chain row_ids table positions ancestors slots "
    "tokens parents given logit_of chosen path accepted leaf bonus next_slots replayed masks "
    "mask_of seeds top_k order starts",
    "*i32": "work",
    "*fp32": "part stats tops values temperature weights",
    "*fp64": "top_p min_p",
    "": "q k v out x residual weight added qkv cos sin q_weight k_weight k_pool v_pool gate_up "
    "logits bias down inner",
    "fp32": "scale softcap eps",
}
# Such parameters are multiples of 16 in real launches, which Triton finds out by itself there.
STRIDE = re.compile(r"\w+_(node|head|slot|row|expert|stride)|table_row")


@dataclass(frozen=True, slots=True)
class Variant:
    """A program with constants; types override those by name."""

    program: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    warps: int = 4


def variants(dtype: str, capability: int) -> Iterator[Variant]:
    """Every program, as an 8B model in `dtype` ("bf16", "fp16", "fp32") would launch it; storing
    in fp8 where the hardware knows it."""
    p = attention_programs
    precision = "ieee" if dtype == "fp32" else "tf32"
    shape = {"HEADS": 8, "GROUP": 4, "LANES": 4, "D": 128, "DIM": 128, "ROWS": 4}
    plain = shape | {"TAIL": 0, "TAIL_DIM": 16}
    for queries, keys, window, words in ((4, 64, 0, 1), (8, 32, 4096, 1), (16, 32, 48, 2)):
        held = {"QUERIES": queries, "KEYS": keys, "WINDOW": window, "NARROW": window == 48}
        more = {"CAPPED": window == 48, "WORDS": words, "PRECISION": precision, "WIDEN": False}
        yield Variant(p.attend_tile, plain | held | more, {})
    yield Variant(p.merge_splits, shape | {"QUERIES": 8, "LINES": 4}, {}, 1)
    cut = {"WINDOW": 64, "QUERIES": 8, "KEYS": 32, "LEAST": 2, "ROWS": 64}
    yield Variant(p.plan_work, cut, {})
    pool = {"HEADS": 8, "HEADS_P": 8, "D": 80, "DIM": 128}
    small = "*fp8e4nv" if capability >= 89 else f"*{dtype}"
    yield Variant(p.store_kv, pool, {"k_pool": small, "v_pool": small}, 1)
    f = fused_programs
    yield Variant(f.norm_rows, {"D": 4096, "DIM": 4096, "ADD": True, "WIDE": False}, {}, 8)
    turn = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "DIM": 128, "NORM": True, "WIDE": False}
    yield Variant(f.rope_and_store, turn, {}, 1)
    yield Variant(f.silu_mul, {"WIDTH": 14336, "BLOCK": 1024}, {})
    yield Variant(f.walk_rows, {"BLOCK": 64}, {}, 1)
    yield Variant(f.settle_rows, {"REPLAYS": True, "BLOCK": 64}, {}, 1)
    d = draw_programs
    for drawing in (False, True):
        held = {"DRAW": drawing, "BLOCK": 2048, "BLOCKS": 128}
        yield Variant(d.best_of_block, held, {"tokens": "*i32"})
    yield Variant(d.best_of_row, {"BLOCKS": 128}, {"tokens": "*i32", "out": "*i64"}, 1)
    yield Variant(d.draw_filtered, {"BLOCK": 512}, {"out": "*i64"}, 8)
    yield from sparse(precision)
    if dtype != "fp32":  # a float32 model holds plain weights
        yield from quantised()


def sparse(precision: str) -> Iterator[Variant]:
    """DeepSeek-V3's attention over latents and its 256 experts, for few tokens and for many."""
    p = attention_programs
    shape = {"HEADS": 8, "GROUP": 16, "LANES": 16, "D": 512, "DIM": 512, "TAIL": 64, "ROWS": 4}
    shape |= {"TAIL_DIM": 64, "WINDOW": 0, "NARROW": False, "CAPPED": False, "WORDS": 1}
    run = {"PRECISION": precision, "WIDEN": False}
    yield Variant(p.attend_tile, shape | run | {"QUERIES": 2, "KEYS": 16}, {}, 8)
    g = grouped_programs
    sizes = {"EXPERTS": 256, "WIDE": 256, "HIDDEN": 7168, "INNER": 2048, "N": 64, "K": 64}
    yield Variant(g.gate_up_tile, sizes | run | {"M": 64, "MANY": 8}, {})
    yield Variant(g.down_tile, sizes | run | {"M": 16}, {})


def quantised() -> Iterator[Variant]:
    """Products with codes: of four bits in groups, of eight by output, fp8 in blocks."""
    p = quantised_linear_programs
    types = {"codes": "*u8", "zero": "*u8", "order": "*i64", "scale": "*fp16"}
    for kind, tiles, ordered in (("int4", 4, True), ("int8", 1, False), ("fp8", 2, False)):
        form: dict[str, Any] = {"KIND": kind, "OFFSET": 8, "PIECE": 128, "WIDTH": 64}
        form |= {"ZEROS": kind == "int4", "ORDERED": ordered}
        run: dict[str, Any] = {"GROUPED": kind != "int8", "BIASED": ordered, "PAD": False}
        run |= {"TILES": tiles, "SPLITS": 1 + tiles // 2, "PRECISION": "tf32", "WIDEN": False}
        yield Variant(p.multiply, form | run, types)
        if kind == "fp8":
            yield Variant(p.expand, form, types)
    yield Variant(p.add_splits, {"SPLITS": 4, "BIASED": True, "BLOCK": 256}, {}, 2)


def type_of(name: str, dtype: str) -> str:
    """Triton's name for the type of a program's parameter."""
    for said, names in NAMES.items():
        if name in names.split():
            return said or f"*{dtype}"
    return "i32"


def compiled(variant: Variant, dtype: str, capability: int) -> dict[str, object]:
    """One row of the report; raises whatever Triton raises for a program that is wrong."""
    begun = perf_counter()
    program = variant.program
    names: Sequence[str] = program.arg_names
    signature = {
        name: "constexpr"
        if name in variant.constants
        else variant.types.get(name) or type_of(name, dtype)
        for name in names
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    apart = {param.name for param in program.params if param.do_not_specialize_on_alignment}
    even = [
        i
        for i, name in enumerate(names)
        if name not in apart and (signature[name][0] == "*" or STRIDE.fullmatch(name))
    ]
    source = ASTSource(
        fn=program,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": variant.warps, "num_stages": 2}
    made = triton.compile(source, target=target, options=options)
    return {
        "program": program.__name__,
        "dtype": dtype,
        "sm": capability,
        "shared": made.metadata.shared,
        **usage(made.asm["cubin"]),
        "bytes": len(made.asm["cubin"]),
        "seconds": round(perf_counter() - begun, 2),
    }


def usage(binary: bytes) -> dict[str, object]:
    """Registers a thread takes and bytes it spills to its stack, by Triton's copy of cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {"registers": None, "stack": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.cubin"
        path.write_bytes(binary)
        ran = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=False
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", ran.stdout)
    registers, stack = map(int, found.groups()) if found else (None, None)
    return {"registers": registers, "stack": stack}


def report(dtypes: Sequence[str], capabilities: Sequence[int]) -> list[dict[str, object]]:
    """All programs in all of these."""
    return [
        compiled(variant, dtype, capability)
        for capability in capabilities
        for dtype in dtypes
        for variant in variants(dtype, capability)
    ]
