"""The FlashInfer backend against a stand-in that has the real wrapper's interface.

The parameters are those of flashinfer-python 0.7.4; the stand-in answers by its documented meaning:
pages of one token, causal from the end, a flat mask per row that replaces it.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.bench.gpu_cases import Case, bushy, error, make
from spec_serve.cache.tree import chain, root
from spec_serve.kernels.base import pick_backend
from spec_serve.kernels.flashinfer import FlashInferAttention

PLAN = """
    qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads
    head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode
    use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type
    kv_data_type o_data_type non_blocking
"""
NAMES = PLAN.split()
SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in NAMES
    ]
)


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper in torch, row by row."""

    plans = 0

    def plan(self, *args: Any, **kwargs: Any) -> None:
        StandIn.plans += 1
        given = SIGNATURE.bind(*args, **kwargs).arguments
        for name in NAMES[:4]:
            assert given[name].dtype == torch.int32, name
        assert given["page_size"] == 1 and set(given["paged_kv_last_page_len"].tolist()) == {1}
        mask = given["custom_mask"]
        assert given["causal"] == (mask is None) and (mask is None or mask.dtype == torch.bool)
        self.given = given

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        given, at, outs = self.given, 0, []
        queries, ends = given["qo_indptr"].tolist(), given["paged_kv_indptr"].tolist()
        for b in range(len(queries) - 1):
            x = q[queries[b] : queries[b + 1]].float()
            pages = given["paged_kv_indices"][ends[b] : ends[b + 1]].long()
            k, v = (part[pages, 0].float() for part in paged_kv_cache)
            n, size = len(x), len(pages)
            behind = torch.arange(size - n, size)[:, None] - torch.arange(size)
            if given["custom_mask"] is None:
                seen = behind >= 0
                if given["window_left"] >= 0:
                    seen &= behind <= given["window_left"]
            else:
                assert given["window_left"] == -1
                seen = given["custom_mask"][at : at + n * size].view(n, size)
                at += n * size
            group = given["num_qo_heads"] // given["num_kv_heads"]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("nhd,khd->hnk", x, k) * given["sm_scale"]
            if given["logits_soft_cap"]:
                scores = given["logits_soft_cap"] * torch.tanh(scores / given["logits_soft_cap"])
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hnk,khd->nhd", weights, v))
        return torch.cat(outs).to(q.dtype)


MIXED = ((0, chain(range(21))), (23, bushy(31, 1)), (70, root(7)), (1, bushy(9, 2, 3)))
CHAINS = ((40, chain(range(30))), (12, root(1)))


@pytest.mark.parametrize(
    "case",
    [
        Case("trees", MIXED),
        Case("trees, window", MIXED, window=4, softcap=2.0),
        Case("chains", CHAINS, dtype=torch.bfloat16),
        Case("chains, window, first 1", CHAINS, window=9, first=1),
        Case("grown", ((23, bushy(31, 1)), (9, bushy(70, 2))), grown=(4, 9), window=3),
    ],
    ids=lambda case: case.name,
)
def test_equals_the_reference(case: Case) -> None:
    assert error(case, FlashInferAttention("cpu", StandIn)) < 1


def test_layers_of_a_kind_share_a_plan_and_kinds_do_not() -> None:
    problem = make(Case("layers", MIXED))
    backend = FlashInferAttention("cpu", StandIn)
    begun = StandIn.plans
    for forward in range(2):
        plan = backend.plan(problem.batch, problem.table)
        for window in (None, 4, None, 4):
            plan.attend(problem.q, problem.k, problem.v, problem.kv, scale=0.1, window=window)
        assert StandIn.plans - begun == 2 * (forward + 1)


def test_what_it_can_not_do_is_said() -> None:
    with pytest.raises(ValueError, match="attention: flashinfer has no kernels for head_dim 80"):
        error(Case("80", CHAINS, head_dim=80), FlashInferAttention("cpu", StandIn))
    with pytest.raises(ValueError, match="attention: flashinfer's kernels run on NVIDIA GPUs"):
        pick_backend("cpu", "flashinfer")
