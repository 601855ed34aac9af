"""Linear maps over codes on a GPU: right, the same for a row in any company, and how fast.

A section of `bench gpu`. Sizes are those of an 8B model's largest matrix; each is compared with
torch over the multiplied-out weight, and timed beside the plain matrix. Knows no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.kernels.quantised import Codes, pack, piece_of

KINDS = {"int4": 128, "int8": 0, "fp8": 128}
"""Kind -> inputs to a scale; 0 = all."""


def random_codes(kind: str, outputs: int, inputs: int, device: torch.device) -> Codes:
    """A matrix of random codes with weights of about 1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(0)
    top = {"int4": 16, "int8": 256, "fp8": 120}[kind]  # fp8 without its NaNs, and positive
    codes = torch.randint(0, top, (outputs, inputs), generator=generator).to(torch.uint8)
    group = KINDS[kind] or inputs
    shape = (outputs, -(-inputs // group))
    size = {"int4": 5.0, "int8": 74.0, "fp8": 120.0}[kind] * inputs**0.5
    scale = (torch.rand(shape, generator=generator) + 0.5) / size
    zero = None
    if kind == "int4":
        codes = pack(codes, piece_of(group, inputs))
        zero = torch.randint(0, top, shape, generator=generator).to(torch.uint8)
    held = Codes(kind, codes, scale, group, inputs, zero, 0 if kind == "fp8" else top // 2)
    return held.to(device)


def quantised(
    ms: Callable[[Callable[[], object]], float], device: torch.device, speed: float, small: bool
) -> Iterator[dict[str, Any]]:
    """error: largest, against the largest value. alone: whether the first row has the same bits by
    itself. share: of the time to read the codes once at `speed` bytes per second."""
    from spec_serve.kernels.quantised_linear import QuantisedProduct

    outputs, inputs = (64, 256) if small else (14_336, 4096)
    dtype = torch.float32 if small else torch.bfloat16
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    for kind in KINDS:
        codes = random_codes(kind, outputs, inputs, device)
        product, plain = QuantisedProduct(codes, processors), codes.weight(dtype)
        lone: Tensor | None = None
        for rows in (1, 3) if small else (1, 8, 32, 64, 512):
            x = torch.randn(64, inputs, generator=torch.Generator().manual_seed(1))
            x = x.repeat(-(-rows // 64), 1)[:rows].to(device, dtype)
            made, wanted = product(x), codes.linear(x)
            lone = made[:1] if lone is None else lone
            worst = float((made - wanted).abs().max() / wanted.abs().max())
            taken = ms(lambda x=x, product=product: product(x))  # type: ignore[misc]
            yield {
                "kind": kind, "rows": rows, "error": worst,
                "alone": "yes" if rows > 64 or torch.equal(made[:1], lone) else "NO",
                "good": "yes" if worst < 0.02 else "NO", "ms": taken,
                "share": codes.nbytes / speed / (taken * 1e-3),
                "plain ms": ms(lambda x=x, plain=plain: F.linear(x, plain)),  # type: ignore[misc]
            }  # fmt: skip
