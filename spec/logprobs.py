"""Log-probabilities to report, always of the target's raw logits.

Convention: log-softmax of the logits as the model gives them, before penalties, bias, masks,
temperature and filters; so the values are the same with and without speculation and comparable
between requests. Every result is finite: what is less probable than exp(FLOOR), or excluded,
is reported as FLOOR. Knows nothing of requests or of which token was drawn how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_serve.spec.filters import ranked

FLOOR = -9999.0
# Logits copied at a time: scoring a long prompt mustn't need the memory of all its rows twice, and
# a CPU does best with what fits its cache.
_BLOCK = {"cpu": 1 << 16}
_BLOCK_ELSEWHERE = 1 << 24


def score(logits: Tensor, at: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Score `tokens` [K] by the logit rows `at` [K] of `logits` [M, V].

    Returns the tokens' log-probabilities [K], and the ids [K, top] and log-probabilities [K, top]
    of the most probable tokens, best first, the lower id first among equals. top is cut to V.
    """
    vocab = logits.shape[-1]
    top = min(top, vocab)
    step = max(1, _BLOCK.get(logits.device.type, _BLOCK_ELSEWHERE) // vocab)
    own, ids, best = [], [], []
    for first in range(0, max(len(at), 1), step):
        x = logits.index_select(0, at[first : first + step]).to(torch.float32)  # [k, V]
        norm = x.logsumexp(-1, keepdim=True)  # [k, 1]
        own.append(x.gather(1, tokens[first : first + step, None]) - norm)
        if top:
            values, which = ranked(x, top)
            ids.append(which)
            best.append(values - norm)
    if not top:
        none = torch.empty((len(at), 0), device=logits.device)
        return _finite(torch.cat(own)).squeeze(1), none.to(torch.int64), none
    return _finite(torch.cat(own)).squeeze(1), torch.cat(ids), _finite(torch.cat(best))


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=FLOOR, posinf=0.0, neginf=FLOOR).clamp(min=FLOOR)
