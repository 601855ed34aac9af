"""Steps recorded as CUDA graphs on a real GPU, against the same steps without graphs and without
fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from spec_serve.draft.base import Drafter
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.base import pick_backend
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.spec.step import TorchDevice
from spec_serve.target.model import load_model
from tests.engines import FLAT, prompts, request, run
from tests.tiny import noisy_copy, tiny_checkpoint

pytestmark = pytest.mark.gpu


def answers(graphs: str, draft: bool) -> tuple[list[list[int]], TorchDevice]:
    model = load_model(tiny_checkpoint(), torch.float32, "cuda")
    drafter: Drafter | None = None
    if draft:
        near = load_model(noisy_copy(tiny_checkpoint(), 0.25), torch.float32, "cuda")
        drafter = StandaloneDrafter(near, pick_backend("cuda"))
    options = EngineOptions(
        target="tiny", kv_tokens=2048, max_rows=4, max_nodes=8, device="cuda", cuda_graphs=graphs,
        attention="auto" if graphs == "auto" else "torch",
    )  # fmt: skip
    made = assemble(model, options, drafter=drafter, lookup=False, cost=CostCurve(FLAT))
    made.builder.grow_always(3, 2)
    more: Sequence[dict[str, object]] = (
        {}, {"temperature": 0.8, "seed": 7}, {"temperature": 0.9, "top_p": 0.8, "seed": 8},
        {"frequency_penalty": 0.5, "temperature": 0.6, "seed": 9},
    )  # fmt: skip
    given = prompts(len(more), 8, 40, seed=1)
    asked = [request(p, 24, **kw) for p, kw in zip(given, more, strict=True)]  # type: ignore[arg-type]
    device = made._device
    assert isinstance(device, TorchDevice)
    return [done.tokens for done in run(made, *asked)], device


@pytest.mark.parametrize("draft", [False, True])
def test_graphs_change_no_token(draft: bool) -> None:
    """float32 throughout: near-ties that flip are not expected among so few tokens."""
    recorded, device = answers("auto", draft)
    assert device.graphs is not None and len(device.graphs.tiers) > 4
    if draft:
        assert device.graphs._drafts, "drafting was never recorded"
    plain, device = answers("off", draft)
    assert device.graphs is None and recorded == plain
