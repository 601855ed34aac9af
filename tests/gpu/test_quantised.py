"""Linear maps over codes on a real GPU: right, the same bits in any company, and in a graph."""

from __future__ import annotations

import pytest
import torch

from spec_serve.bench.gpu_quantised import KINDS, quantised, random_codes

pytestmark = pytest.mark.gpu


def test_every_kind_is_right_at_the_size_of_a_model() -> None:
    records = list(quantised(lambda work: 1.0, torch.device("cuda:0"), 1e12, False))
    assert {(row["good"], row["alone"]) for row in records} == {("yes", "yes")}
    assert {row["kind"] for row in records} == set(KINDS)


def test_a_graph_follows_its_input() -> None:
    from spec_serve.kernels.quantised_linear import QuantisedProduct

    codes = random_codes("int4", 512, 1024, torch.device("cuda:0"))
    product = QuantisedProduct(codes, 132)
    x = torch.randn(5, 1024, device="cuda", dtype=torch.bfloat16)
    product(x)  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = product(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(held, product(x))
