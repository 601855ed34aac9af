"""Drawing, walk and table by fused kernels: what steps on NVIDIA GPUs use.

Temperature, noise, filters and a constraint's masks are applied where the logits are read, without
sorting or copying them. Penalties, bias, bad words and `min_tokens`, which touch few cells, are
edited before by the torch code. Equals `TorchSteps` but for the last bits of the noise.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.kernels import fused, fused_draw
from spec_serve.spec.nodes import NodeSampling
from spec_serve.spec.sampling import edited
from spec_serve.spec.verify import Verdict


class FusedSteps:
    """See `spec.operations.StepOperations`."""

    name = "fused"

    def choose(self, logits: Tensor, nodes: NodeSampling | None) -> Tensor:
        """Greedy and freely sampled rows in one launch sequence, rows with filters in another."""
        if nodes is None:
            return logits.argmax(-1)
        nodes, masks = _apart(nodes)
        x = edited(logits, nodes)
        greedy, behind = nodes.greedy, nodes.greedy + nodes.free
        seeds, positions = nodes.key_seed, nodes.key_position
        if nodes.key_of is not None:
            seeds, positions = seeds[nodes.key_of], positions[nodes.key_of]
        free, rest = slice(None, nodes.free), slice(nodes.free, None)
        first, last = slice(None, behind), slice(behind, None)
        picks: list[Tensor] = []
        if behind:
            temperature = F.pad(nodes.temperature[free], (greedy, 0))
            keys = F.pad(seeds[free], (greedy, 0)), F.pad(positions[free], (greedy, 0))
            picks.append(fused_draw.draw(x[first], temperature, *keys, _of(masks, first)))
        if behind < len(x):
            keys = seeds[rest], positions[rest]
            limits = nodes.top_k, nodes.top_p, nodes.min_p
            picks.append(
                fused_draw.draw_filtered(
                    x[last], nodes.temperature[rest], *keys, *limits, _of(masks, last)
                )
            )
        picked = torch.cat(picks) if len(picks) > 1 else picks[0]
        if nodes.work is None:
            return picked
        return logits.argmax(-1).index_copy_(0, nodes.work, picked)

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See `StepOperations`."""
        return fused_draw.draw(logits, temperature, seeds, positions)

    def walk(self, batch: TreeBatch, chosen: Tensor, depth: int) -> Verdict:
        """See `StepOperations`."""
        return Verdict(*fused.walk(batch, chosen, depth))

    def settle(
        self,
        batch: TreeBatch,
        verdict: Verdict,
        next_slots: Tensor,
        table: Tensor,
        replayed: Tensor | None = None,
    ) -> None:
        """See `StepOperations`."""
        fused.settle(batch, verdict.path, verdict.leaf, next_slots, table, replayed)


def _apart(nodes: NodeSampling) -> tuple[NodeSampling, fused_draw.Masks | None]:
    """The sampling without its masks, and the masks, where the kernels can apply them.

    Bad words and `min_tokens` yield if the mask leaves nothing else, so they have to come after it.
    """
    edits = nodes.edits
    if edits is None or edits.allowed is None or edits.bad is not None or edits.end is not None:
        return nodes, None
    rows, bits = edits.allowed
    count = nodes.greedy + len(nodes.temperature)
    which = rows.new_full((count,), -1)
    which[rows] = torch.arange(len(rows), device=rows.device)
    others = (edits.penalties, edits.bias, edits.unused)
    left = None if others == (None, None, None) else replace(edits, allowed=None)
    return replace(nodes, edits=left), (which, bits.contiguous())


def _of(masks: fused_draw.Masks | None, part: slice) -> fused_draw.Masks | None:
    return None if masks is None else (masks[0][part].contiguous(), masks[1])
