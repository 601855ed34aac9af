"""P-EAGLE: an EAGLE-3 head that answers several positions at once, by masks behind the newest pair.

Each mask is the mask token beside a learnt feature that stands for what is not known yet; masks see
the pairs before them and each other causally. Their K/V are scratch. Source: speculators (vllm),
models/peagle. The head's equations are draft/head.py's, the tree draft/block_tree.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.block_tree import block_tree
from spec_serve.draft.feature import FeatureDrafter, paired


class ParallelDrafter(FeatureDrafter):
    """Drafts as many positions in one pass as the plan is deep."""

    def scratch(self, plan: Plan) -> int:
        """One slot a mask."""
        return max(0, plan.depth - 1)

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py."""
        assert seen.taps is not None, "the engine gives a drafter the taps it asks for"
        newest = seen.batch.tokens[seen.last]  # [B]
        seen = paired(seen)
        assert seen.taps is not None
        head = self.head
        feature = head.feature(seen.taps)
        if plan.nodes == 0:
            self._note(seen.batch, feature)
            return None
        hidden, _ = self._run(seen.batch, feature, seen.last)
        rows, masks = seen.batch.rows, plan.depth - 1
        levels = hidden.unsqueeze(1)  # [B, 1, H]
        if masks:
            batch = self._masks(seen, grants, masks)
            assert head.mask_feature is not None
            behind, _ = self._run(batch, head.mask_feature.expand(len(batch), -1))
            levels = torch.cat((levels, behind.view(rows, masks, -1)), 1)  # [B, D, H]
        logits = head.logits(levels.reshape(rows * plan.depth, -1))
        logits = logits.view(rows, plan.depth, -1)
        return block_tree(logits, seen.length, newest, plan, noise, head.ids)

    def _masks(self, seen: Seen, grants: Tensor, masks: int) -> TreeBatch:
        """A chain of masks behind each row's newest token."""
        token = self.head.config.mask_token
        assert token is not None, "P-EAGLE's files name it"
        rows, device = seen.batch.rows, seen.length.device
        count = rows * masks
        slots = grants[:, :masks].reshape(-1)
        ptr = torch.arange(rows + 1, device=device) * masks
        nodes = torch.arange(count, device=device)
        place = torch.arange(masks, device=device)
        return TreeBatch(
            tokens=torch.full((count,), token, dtype=torch.int64, device=device),
            positions=(seen.length.unsqueeze(1) + place).view(-1),
            parents=torch.where(nodes % masks == 0, -1, nodes - 1),
            slots=slots,
            row_of=torch.arange(rows, device=device).repeat_interleave(masks),
            ancestors=torch.zeros(count, 1, dtype=torch.int64, device=device),
            given=torch.zeros(count, dtype=torch.int64, device=device),
            logit_of=nodes,
            logits_at=nodes,
            node_ptr=ptr,
            twig_ptr=ptr,
            twig_slots=slots,
            row_ids=seen.batch.row_ids,
            prefix=seen.length,
            chain=torch.ones(rows, dtype=torch.int64, device=device),
        )
