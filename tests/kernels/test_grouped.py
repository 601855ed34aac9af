"""Grouped products of experts: Triton's programs in the interpreter against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spec_serve.kernels.grouped import pick_grouped, torch_grouped
from spec_serve.kernels.grouped_gemm import triton_grouped
from tests.kernels.interpreted import DEVICE


@pytest.mark.parametrize(
    ("nodes", "many", "experts", "hidden", "inner"),
    [(1, 2, 5, 40, 24), (37, 3, 6, 72, 80), (90, 2, 2, 16, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(
    nodes: int, many: int, experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    """Experts that nobody chose hold NaN: what is not asked for is not read."""
    noise = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, hidden, generator=noise)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=noise) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=noise) / inner**0.5
    scores = torch.rand(nodes, experts, generator=noise)
    scores[:, 1] -= float(nodes < 80)  # expert 1 gets nothing, unless there are only two
    chosen = scores.topk(many).indices
    weights = torch.rand(nodes, many, generator=noise)
    unused = torch.ones(experts, dtype=torch.bool)
    unused[chosen] = False
    gate_up[unused], down[unused] = float("nan"), float("nan")
    x, gate_up, down = (part.to(DEVICE, dtype) for part in (x, gate_up, down))
    weights, chosen = weights.to(DEVICE), chosen.to(DEVICE)
    wanted = torch_grouped(x, gate_up, down, weights, chosen, F.silu)
    got = triton_grouped(x, gate_up, down, weights, chosen, F.silu)
    assert got.dtype == dtype and wanted.std() > 0.1
    bound = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def test_other_gates_and_devices_use_torch() -> None:
    assert pick_grouped(torch.device("cpu")) is torch_grouped
    x, weights = torch.randn(3, 8, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    gate_up, down = torch.randn(2, 8, 8, device=DEVICE), torch.randn(2, 8, 4, device=DEVICE)
    chosen = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    got = triton_grouped(x, gate_up, down, weights, chosen, F.gelu)
    gate, up = (x @ gate_up[0].T).chunk(2, -1)
    torch.testing.assert_close(got, (F.gelu(gate) * up) @ down[0].T)
