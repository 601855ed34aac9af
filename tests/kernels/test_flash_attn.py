"""The FlashAttention backend against a stand-in that has the library's two interfaces.

The parameters are those of vllm-flash-attn 2.6.2 and of the copy inside vLLM; the stand-in answers
by their documented meaning: sequences end to end, or pages of one token; causal from the end.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.bench.gpu_cases import Case, bushy, error
from spec_serve.cache.tree import chain, root
from spec_serve.kernels import base
from spec_serve.kernels.flash_attn import FlashAttention, Library, library, place

ALONE = """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal
    window_size softcap alibi_slopes deterministic return_attn_probs block_table out"""
INSIDE = """q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p
    softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs
    block_table return_softmax_lse out scheduler_metadata q_descale k_descale v_descale num_splits
    fa_version s_aux cp_world_size cp_rank cp_tot_seqused_k"""


def signature(names: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(n, kind, default=None) for n in names.split()])


def attended(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One sequence: [n, heads, D] and [heads, n]."""
    n, size = len(q), len(k)
    assert size, "the library's sums of an empty sequence are not to be used"
    behind = torch.arange(size - n, size)[:, None] - torch.arange(size)
    seen = behind >= 0 if given["causal"] else torch.ones(n, size, dtype=torch.bool)
    left, right = given["window_size"]
    if left >= 0:
        assert given["causal"] and right == 0
        seen = seen & (behind <= left)
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,khd->hnk", q.float(), k) * given["softmax_scale"]
    if given["softcap"]:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), v), scores.logsumexp(-1)


class StandIn:
    """flash_attn_varlen_func of a version, as in `Library`."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.paged = 0
        self.calls = 0
        self.__signature__ = signature(INSIDE if version else ALONE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.__signature__.bind(*args, **kwargs).arguments
        q, k, v = given["q"], given["k"], given["v"]
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        table = given.get("block_table")
        assert (table is None) == ("seqused_k" not in given) == ("cu_seqlens_k" in given)
        assert given["cu_seqlens_q"].dtype == torch.int32
        queries = given["cu_seqlens_q"].tolist()
        outs, sums = [], []
        for b in range(len(queries) - 1):
            if table is not None:
                assert self.version == 3 and k.shape[1] == 1 and table.dtype == torch.int32
                pages = table[b, : int(given["seqused_k"][b])].long()
                keys, values = k[pages, 0], v[pages, 0]
            else:
                ends = given["cu_seqlens_k"].tolist()
                keys, values = k[ends[b] : ends[b + 1]], v[ends[b] : ends[b + 1]]
            assert len(keys) <= given["max_seqlen_k"]
            assert queries[b + 1] - queries[b] <= given["max_seqlen_q"]
            out, lse = attended(q[queries[b] : queries[b + 1]], keys, values, given)
            outs.append(out)
            sums.append(lse)
        self.calls += 1
        self.paged += table is not None
        made = torch.cat(outs).to(q.dtype), torch.cat(sums, 1)
        if self.version:
            assert given["fa_version"] == self.version and given["return_softmax_lse"]
            return made
        assert given["return_attn_probs"]
        return (*made, None)


MIXED = ((0, chain(range(21))), (23, bushy(31, 1)), (70, root(7)), (1, bushy(9, 2, 3)),
         (0, bushy(5, 3)))  # fmt: skip
GROWN = ((23, bushy(31, 1)), (9, bushy(70, 2)))
HALF = torch.float16


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", MIXED, dtype=HALF),
        Case("window over all, soft-cap", MIXED, window=200, softcap=2.0, dtype=HALF),
        Case("window that cuts trees", MIXED, window=4, first=1, dtype=torch.bfloat16),
        Case("chains, window", MIXED[::2], window=9, dtype=HALF),
        Case("grown", GROWN, grown=(4, 9), dtype=HALF),
        Case("fp8 pool", MIXED, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    ],
    ids=lambda case: case.name,
)
def test_equals_the_reference(case: Case, version: int) -> None:
    stand_in = StandIn(version)
    sums = "return_softmax_lse" if version else "return_attn_probs"
    assert error(case, FlashAttention("cpu", Library(stand_in, version, sums))) < 1
    # In pages where it can, and never where the pool has another dtype.
    assert bool(stand_in.paged) == (version == 3 and case.kv_dtype is None)
    assert stand_in.calls <= 2


def test_what_it_can_not_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashAttention("cpu", Library(StandIn(2), 2))
    with pytest.raises(ValueError, match=r"no kernels for torch.float32; try triton"):
        error(Case("wide", MIXED), backend)
    with pytest.raises(ValueError, match="no kernels for head_dim 260"):
        error(Case("260", MIXED[:1], head_dim=260, dtype=HALF), backend)
    with pytest.raises(ValueError, match="attention: flash-attn's kernels run on NVIDIA GPUs"):
        base.pick_backend("cpu", "flash-attn")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("spec_serve.kernels.flash_attn.place", lambda: "")
    with pytest.raises(ValueError, match="vllm-flash-attn is not installed"):
        base.pick_backend("cuda", "flash-attn")


@pytest.mark.parametrize(
    ("source", "version"),
    [
        ("def flash_attn_varlen_func(q, k, v, return_attn_probs=False): ...", 0),
        ("def flash_attn_varlen_func(return_attn_probs=False, return_softmax_lse=False): ...", 0),
        ("def flash_attn_varlen_func(q, k, v, fa_version=2): ...\n"
         "def is_fa_version_supported(version, device): return device.type == 'cpu'", 3),
        ("def flash_attn_varlen_func(q, k, v, fa_version=2): ...\n"
         "def is_fa_version_supported(version, device): return False", 2),
    ],
)  # fmt: skip
def test_what_is_installed_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, version: int
) -> None:
    name = "vllm.vllm_flash_attn" if version else "vllm_flash_attn"
    folder = tmp_path.joinpath(*name.split("."))
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(source)
    importlib.invalidate_caches()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert place() == name
        assert not {"vllm", "vllm_flash_attn"} & set(sys.modules)
        found = library(torch.device("cpu"))
        assert found.version == version
        assert (found.sums == "return_softmax_lse") == ("v, return_attn" not in source)
    finally:
        for held in [held for held in sys.modules if held.startswith("vllm")]:
            del sys.modules[held]
