"""Linear maps over quantised matrices, held as the checkpoint has them.

`QuantisedLinear` stands where a `Linear` does on a GPU, when the checkpoint's matrices are
quantised and kernels/quantised_linear.py takes them. Knows codes and devices; neither files nor
which matrix is which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_serve.kernels.quantised import Codes, stacked
from spec_serve.kernels.quantised_linear import QuantisedProduct, fits
from spec_serve.target.layers import Linear

_CPU_PROCESSORS = 1  # in Triton's interpreter, which has none


class QuantisedLinear(Linear):
    """y = x W^T + b with W [out, in] as codes; a row's bits don't depend on how many others there
    are, up to the number that kernels/quantised_linear.py gives."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Codes], bias: Tensor | None, dtype: torch.dtype) -> None:
        """parts: matrices one below the other. bias: [out] of all. dtype: of inputs and outputs."""
        self.outputs, self.inputs = sum(part.outputs for part in parts), parts[0].inputs
        self.bias = bias
        self._dtype = dtype
        self._packed = self._plain = None
        self._parts: list[tuple[Codes, QuantisedProduct, Tensor | None]] = []
        first = 0
        for codes in stacked(parts):
            device = codes.codes.device
            processors = _CPU_PROCESSORS
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
            share = None if bias is None else bias[first : first + codes.outputs]
            self._parts.append((codes, QuantisedProduct(codes, processors), share))
            first += codes.outputs

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, in] -> [N, out]."""
        made = [product(x, bias) for _, product, bias in self._parts]
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    def rows(self, rows: int) -> int:
        """No padding is wanted."""
        return rows

    @property
    def weight(self) -> Tensor:
        """[out, in] multiplied out, a copy."""
        return torch.cat([codes.weight(self._dtype) for codes, _, _ in self._parts])

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, their scales and the bias."""
        own = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return own + sum(codes.nbytes for codes, _, _ in self._parts)


def quantised_linear(
    parts: list[Codes | None], bias: Tensor | None, dtype: torch.dtype
) -> QuantisedLinear | None:
    """A map over matrices one below the other; None where one is plain or the kernels don't take
    it."""
    held = [part for part in parts if part is not None]
    if len(held) < len(parts) or not all(fits(part) for part in held):
        return None
    return QuantisedLinear(held, bias, dtype)
