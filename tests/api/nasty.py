"""Values that break servers, and requests made of them; shared by tests of bad input.

Knows the fields of a request by looking at `Generate` itself, so that a new one is tried too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from spec_serve.api import messages as m

NUMBERS: list[Any] = [
    -1, 0, 1, 2, 7, 8, 9, 20, 21, 255, 256, 257, 1024, 1025, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), -(2**63) - 1, 10**40, 0.0, -0.0, 0.5, 1.0, 1.5,
    2.0, 2.1, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "a", "\x00", "\x00\x01\x7f\x1b[2J", "\r\n\r\n", "\ud800", "a\udfff", "\ud83d\ude00",
    "\ufffd\ufffe\U0010ffff", "é\u0301\u202e\u200b", "<|im_start|>system", "<eos></s><|endoftext|>",
    "{{ 1 }}{% raise %}", "../../etc/passwd", "'; DROP TABLE x; --", "%s%n%x", "g" * 65, "x" * 257,
    "auto", "off", "max", "none", "tokens", "generate", "1", "-1", "NaN", "true",
]  # fmt: skip
LONG = "long " * (1 << 18)  # more than 1 MiB
OTHERS: list[Any] = [
    None, True, False, [], {}, [None], [[]], [-1], [2**63], ["", "x" * 300], [""] * 100, [0] * 2000,
    {"": 0}, {"a": 1}, {"-1": 1}, {"0": float("nan")}, {"0": 1, "00": 2}, {"9" * 30: 1.0},
    {str(i): 0.5 for i in range(1025)}, [{"role": "user", "content": "hi"}], [{"role": "robot"}],
    [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}], [{"type": "function"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}],
]  # fmt: skip
VALUES = [*NUMBERS, *TEXTS, *OTHERS]
NESTED: dict[str, type[msgspec.Struct]] = {"sampling": m.Sampling, "speculation": m.Speculation}
FIELDS = [
    *(name for name in m.Generate.__struct_fields__ if name not in NESTED),
    *(f"{outer}.{name}" for outer, kind in NESTED.items() for name in kind.__struct_fields__),
    "sampling", "speculation", "unknown", "sampling.unknown",
]  # fmt: skip


def with_field(request: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The request with one field, such as sampling.seed, set."""
    outer, _, inner = field.partition(".")
    if not inner:
        return {**request, outer: value}
    within = request.get(outer)
    return {**request, outer: {**(within if isinstance(within, dict) else {}), inner: value}}


def requests(random_ones: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Each field with each value, 1 MiB of text too; then so many with one to three of them."""
    plain = {"gen": "g", "prompt": "hello", "max_tokens": 3}
    for field in FIELDS:
        for value in (*VALUES, LONG):
            yield with_field(plain, field, value)
    chance = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        plain,
        {"gen": "g", "token_ids": [1, 2, 3]},
        {"gen": "g", "messages": [{"role": "user", "content": "hi"}]},
    ]
    for _ in range(random_ones):
        made = chance.choice(kinds)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            made = with_field(made, chance.choice(FIELDS), chance.choice(VALUES))
        yield made


def mutated(chance: random.Random, frame: bytes) -> bytes:
    """A frame with one to three things wrong: bytes changed, cut, doubled or put in."""
    data = bytearray(frame)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0:
                data[at : at + chance.randint(1, 8)] = b""
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = data[: chance.randrange(len(data) + 1)]
            case _:
                data[at : at + 1] = bytes([chance.randrange(256)])
    return bytes(data)
