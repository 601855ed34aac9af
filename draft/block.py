"""Block drafters (DFlash, DSpark): features become K/V of every draft layer, one pass answers all.

The context of position p lies in the slot of the token behind it, like a pair of other heads, and
depends on nothing that comes later. A block is the newest token and masks, which see each other
and the whole context; its K/V are scratch. Source: z-lab/dflash, dflash/model.py, and DSpark (arXiv
2607.05147) for the Markov head. How guesses are verified isn't known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.batch import WORD, TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.block_tree import block_tree
from spec_serve.draft.feature import PAIRED_FROM, paired
from spec_serve.draft.head import Parts, TargetParts, checked_ids
from spec_serve.draft.head_file import HeadFile
from spec_serve.kernels.base import AttentionBackend, AttentionPlan
from spec_serve.target.layers import MLP, Linear, RMSNorm
from spec_serve.target.rope import Rotary, Rotation, rotate


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """A decoder layer whose K and V can also be made of something that is not normed by it."""

    attention_norm: RMSNorm
    q: Linear
    kv: Linear
    out: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: MLP
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    def keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """K and V [N, kv heads, D] of rows x [N, H]."""
        k, v = self.kv(x).view(-1, 2 * self.kv_heads, self.head_dim).chunk(2, 1)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(k, rotation), v

    def __call__(self, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """x: [N, H] -> [N, H]."""
        read = self.attention_norm(x)
        q = self.q(read).view(-1, self.heads, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        k, v = self.keys(read, rotation)
        mixed = plan.attend(rotate(q, rotation), k, v.contiguous(), kv, scale=self.scale)
        x = x + self.out(mixed.reshape(x.shape[0], -1))
        return x.add_(self.mlp(self.mlp_norm(x)))


class BlockHead:
    """A loaded head. `config`: its HeadConfig. ids: target id of each draft id, None = the same."""

    def __init__(
        self,
        file: HeadFile,
        target: TargetParts,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        config = self.config = file.config
        block = config.block
        self.dtype, self.device = dtype, torch.device(device)
        self.vocab = target.config.vocab
        self.ids = checked_ids(file, self.vocab, self.device)
        self._target = target
        parts = Parts(file, dtype, self.device)
        self._fuse = parts.linear("fuse")
        self._context_norm = parts.needed("feature_norm.weight")
        self._norm = parts.needed("norm.weight")
        self._head = parts.linear("lm_head")
        own = file.has("embed_tokens.weight")
        self._embedding = parts.tensor("embed_tokens.weight") if own else target.embedding
        self._layers = [_layer(parts, file, i) for i in range(block.layers)]
        self._rotary = Rotary(block.rope, block.head_dim, dtype, self.device)
        self.kv_specs = (KVSpec(block.kv_heads, block.head_dim, dtype),) * block.layers
        self._markov = (
            (parts.tensor("markov_w1.weight"), parts.linear("markov_w2"))
            if file.has("markov_w1.weight")
            else None
        )

    def note(self, taps: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[LayerKV]) -> None:
        """File context: taps [N, taps * Ht] of the features at `positions` [N] into `slots` [N]."""
        assert self._fuse is not None
        context = self._context_norm(self._fuse(taps.to(self.dtype)))  # [N, H]
        rotation = self._rotary.at(positions)
        for layer, held in zip(self._layers, kv, strict=True):
            k, v = layer.keys(context, rotation)
            held.k.index_copy_(0, slots, k)
            held.v.index_copy_(0, slots, v.contiguous())

    def run(self, batch: TreeBatch, kv: Sequence[LayerKV], plan: AttentionPlan) -> Tensor:
        """What the head reads of every node of blocks, [N, H]."""
        inside = torch.where(batch.tokens < self._embedding.shape[0], batch.tokens, 0)
        x = F.embedding(inside, self._embedding).to(self.dtype)
        rotation = self._rotary.at(batch.positions)
        for layer, held in zip(self._layers, kv, strict=True):
            x = layer(x, rotation, held, plan)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, draft vocabulary] float32, never an id the target lacks."""
        made = self._target.head(hidden) if self._head is None else self._head(hidden).float()
        return made if self.ids is not None else made[:, : self.vocab]

    @property
    def has_markov(self) -> bool:
        """Whether a token's logits depend on the one before it."""
        return self._markov is not None

    def bias(self, tokens: Tensor) -> Tensor:
        """What the tokens before [K] add to the logits of those after, [K, draft vocabulary]."""
        assert self._markov is not None
        table, onto = self._markov
        assert onto is not None
        inside = torch.where(tokens < table.shape[0], tokens, 0)
        made = onto(F.embedding(inside, table)).float()
        return made if self.ids is not None else made[:, : self.vocab]


def _layer(parts: Parts, file: HeadFile, i: int) -> BlockLayer:
    block, name = file.config.block, f"layers.{i}."
    bias = block.qkv_bias
    return BlockLayer(
        attention_norm=parts.needed(name + "input_layernorm.weight"),
        q=parts.stacked(name, ("self_attn.q_proj",), bias),
        kv=parts.stacked(name, ("self_attn.k_proj", "self_attn.v_proj"), bias),
        out=parts.stacked(name, ("self_attn.o_proj",), block.o_bias),
        q_norm=parts.norm(name + "self_attn.q_norm.weight"),
        k_norm=parts.norm(name + "self_attn.k_norm.weight"),
        mlp_norm=parts.needed(name + "post_attention_layernorm.weight"),
        mlp=parts.mlp(name),
        heads=block.heads,
        kv_heads=block.kv_heads,
        head_dim=block.head_dim,
        scale=block.attention_scale,
    )


class BlockDrafter:
    """Drafts whole blocks with a head that reads `taps`."""

    def __init__(
        self, head: BlockHead, attention: AttentionBackend, name: str | None = None
    ) -> None:
        self.name = name or head.config.format
        self.head = head
        self.config = head.config
        self.kv_specs: tuple[KVSpec, ...] = head.kv_specs
        self.taps: tuple[int, ...] = head.config.taps
        self._attention = attention
        self._layers: Sequence[LayerKV] = ()
        self._table: Tensor = torch.zeros(0, 0, dtype=torch.int64)

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """The pool's tensors of this drafter's layers and its table."""
        self._layers, self._table = layers, table

    def scratch(self, plan: Plan) -> int:
        """Slots a block takes, however many of its guesses are wanted."""
        return self.head.config.block_size if plan.nodes else 0

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py."""
        assert seen.taps is not None, "the engine gives a drafter the taps it asks for"
        newest = seen.batch.tokens[seen.last]  # [B]
        seen = paired(seen)
        batch = seen.batch
        assert seen.taps is not None
        self.head.note(seen.taps, batch.positions - 1, batch.slots, self._layers)
        if plan.nodes == 0:
            return None
        config = self.head.config
        size = config.block_size
        block = self._block(seen, newest, grants, size)
        attending = self._attention.plan(block, self._table, PAIRED_FROM)
        hidden = self.head.run(block, self._layers, attending)
        hidden = hidden.view(batch.rows, size, -1)[:, 0 if config.anchor_predicts else 1 :]
        hidden = hidden[:, : plan.depth]  # [B, D, H]
        depth = hidden.shape[1]
        logits = self.head.logits(hidden.reshape(batch.rows * depth, -1))
        bias = self.head.bias if self.head.has_markov else None
        return block_tree(
            logits.view(batch.rows, depth, -1),
            seen.length,
            newest,
            plan,
            noise,
            self.head.ids,
            bias,
        )

    def _block(self, seen: Seen, newest: Tensor, grants: Tensor, size: int) -> TreeBatch:
        """The newest token of each row and masks behind it, every node seeing all of them."""
        rows, device = seen.batch.rows, newest.device
        mask = self.head.config.mask_token
        assert mask is not None
        tokens = torch.full((rows, size), mask, dtype=torch.int64, device=device)
        tokens[:, 0] = newest
        row = torch.arange(rows, device=device)
        count = rows * size
        slots = grants[:, :size].reshape(-1)
        ptr = torch.arange(rows + 1, device=device) * size
        nodes = torch.arange(count, device=device)
        return TreeBatch(
            tokens=tokens.reshape(-1),
            positions=((seen.length - 1).unsqueeze(1) + torch.arange(size, device=device)).view(-1),
            parents=torch.full((count,), -1, device=device),
            slots=slots,
            row_of=row.repeat_interleave(size),
            ancestors=_all_of(size, device).expand(count, -1).contiguous(),
            given=torch.zeros(count, dtype=torch.int64, device=device),
            logit_of=nodes,
            logits_at=nodes,
            node_ptr=ptr,
            twig_ptr=ptr,
            twig_slots=slots,
            row_ids=seen.batch.row_ids,
            prefix=seen.length,
            chain=torch.zeros(rows, dtype=torch.int64, device=device),
        )


def _all_of(size: int, device: torch.device) -> Tensor:
    """[1, W] words with the first `size` bits set."""
    bits = torch.zeros(-(-size // WORD), dtype=torch.int64, device=device)
    for i in range(size):
        bits[i // WORD] |= 1 << (i % WORD) if i % WORD < WORD - 1 else -(1 << (WORD - 1))
    return bits.unsqueeze(0)
