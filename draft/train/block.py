"""A block drafter as it is trained: one pass over the newest token and masks answers many places.

The equations of draft/block.py over whole sequences, with gradients. Every draft layer makes its
own keys of the target's features; a block sees those before its anchor and all of itself. Source:
DFlash (arXiv 2602.06036): blocks begin at random places of the answer, and a place counts the less
the further it is from its anchor. Knows no data and no optimiser.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.train.head import HeadShape
from spec_serve.draft.train.named import NamedWeights, rotate
from spec_serve.draft.train.unroll import Example, Teacher, Unrolled
from spec_serve.draft.train.warm import TargetParts, calmed, features_of

UNSURE = 0.4
"""What the logits of a head that knows nothing yet are scaled by, against the target's."""

Blocks = tuple[Tensor, Tensor, Tensor]
"""Features made context [n, H], the anchors' positions [A], what is embedded [A, B, H]."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A head's sizes; `plain` as of other heads. layers: of the draft. size: places of a block, the
    anchor's included. mask: the token that stands for what is not known."""

    plain: HeadShape
    layers: int
    size: int
    mask: int


def block_shape(plain: HeadShape, layers: int, size: int, ends: Collection[int]) -> BlockShape:
    """The mask is the highest id that ends nothing: the rarest a tokenizer has.

    ValueError for sizes that guess nothing."""
    if layers < 1:
        raise ValueError(f"block-layers: must be at least 1, got {layers}")
    if size < 2:
        raise ValueError(f"unrolled: must be at least 1, got {size - 1}")
    kept = set(ends)
    mask = next(token for token in reversed(range(plain.vocab)) if token not in kept)
    return BlockShape(plain, layers, size, mask)


class BlockHead(NamedWeights):
    """Weights under the names of z-lab's layout, and the output rows of a reduced vocabulary."""

    def __init__(self, shape: BlockShape) -> None:
        plain = shape.plain
        h, dim = plain.hidden, plain.head_dim
        q, kv = plain.heads * dim, plain.kv_heads * dim
        sizes = {"fc": (h, len(plain.taps) * h), "lm_head": (plain.draft_vocab, h)}
        norms = {"hidden_norm": h, "norm": h}
        for i in range(shape.layers):
            layer = f"layers.{i}."
            sizes |= {
                f"{layer}self_attn.q_proj": (q, h),
                f"{layer}self_attn.k_proj": (kv, h),
                f"{layer}self_attn.v_proj": (kv, h),
                f"{layer}self_attn.o_proj": (h, q),
                f"{layer}mlp.gate_proj": (plain.intermediate, h),
                f"{layer}mlp.up_proj": (plain.intermediate, h),
                f"{layer}mlp.down_proj": (h, plain.intermediate),
            }
            norms |= {
                f"{layer}input_layernorm": h,
                f"{layer}post_attention_layernorm": h,
                f"{layer}self_attn.q_norm": dim,
                f"{layer}self_attn.k_norm": dim,
            }
        super().__init__(sizes, norms, len(plain.taps) * h)
        self.shape = shape

    def context(self, taps: Tensor) -> Tensor:
        """What layers make keys of: taps [n, T * H] -> [n, H]."""
        return self._norm(F.linear(taps.float() / self.scale, self["fc"]), "hidden_norm")

    def run(self, sequences: Sequence[Blocks]) -> Tensor:
        """What the output rows read of every block's places, all sequences', [A, B, H]."""
        plain, size = self.shape.plain, self.shape.size
        contexts = torch.cat([context for context, _, _ in sequences])
        lengths = [len(context) for context, _, _ in sequences]
        counts = [len(anchors) for _, anchors, _ in sequences]
        x = torch.cat([embedded for _, _, embedded in sequences]).view(-1, plain.hidden).float()
        device = x.device
        places = torch.cat([torch.arange(n, device=device) for n in lengths])
        inside = torch.arange(size, device=device)
        at = torch.cat([anchors for _, anchors, _ in sequences])
        positions = (at.unsqueeze(1) + inside).view(-1)  # [A * B]
        for i in range(self.shape.layers):
            name = f"layers.{i}."
            read = self._norm(x, name + "input_layernorm")
            q = self._heads(read, name, "q", positions).view(-1, size, plain.heads, plain.head_dim)
            own_k, own_v = self._keys(read, name, positions, size)
            k, v = self._keys(contexts, name, places, 1)
            parts = zip(
                q.split_with_sizes(counts),
                own_k.split_with_sizes(counts),
                own_v.split_with_sizes(counts),
                k.squeeze(1).split_with_sizes(lengths),
                v.squeeze(1).split_with_sizes(lengths),
                (anchors for _, anchors, _ in sequences),
                strict=True,
            )
            mixed = [_attend(a, b, c, d, e, f) for a, b, c, d, e, f in parts]
            x = x + F.linear(torch.cat(mixed).view(len(x), -1), self[name + "self_attn.o_proj"])
            y = self._norm(x, name + "post_attention_layernorm")
            gate, up = (F.linear(y, self[f"{name}mlp.{part}_proj"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self[name + "mlp.down_proj"])
        return x.view(-1, size, plain.hidden)

    def logits(self, out: Tensor, ids: Tensor | None = None) -> Tensor:
        """Scores over the draft vocabulary [..., D], or over these draft ids [C] of it."""
        rows: Tensor = self["lm_head"]
        return F.linear(self._norm(out, "norm"), rows if ids is None else rows[ids])

    def _keys(self, x: Tensor, name: str, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """K and V of rows x, [N / size, size, kv_heads, D] each."""
        plain = self.shape.plain
        k = self._heads(x, name, "k", positions)
        v = F.linear(x, self[name + "self_attn.v_proj"]).float()
        wanted = (-1, size, plain.kv_heads, plain.head_dim)
        return k.view(wanted), v.view(wanted)

    def _heads(self, x: Tensor, name: str, which: str, positions: Tensor) -> Tensor:
        """Normed and rotated heads [N, heads, D]."""
        plain = self.shape.plain
        made = F.linear(x, self[f"{name}self_attn.{which}_proj"]).view(len(x), -1, plain.head_dim)
        return rotate(self._norm(made, f"{name}self_attn.{which}_norm"), positions, plain.theta)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self[name], self.shape.plain.eps)


def _attend(
    q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, anchors: Tensor
) -> Tensor:
    """Attention of one sequence's blocks, [A, B, heads, D]: all features before the anchor [A], and
    the block itself in both directions."""
    count, size, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(count, size, kv_heads, heads // kv_heads, dim) * dim**-0.5
    before = torch.einsum("abkgd,nkd->akgbn", grouped, k).float()
    seen = torch.arange(len(k), device=q.device) < anchors.unsqueeze(1)  # [A, n]
    before = before.masked_fill(~seen[:, None, None, None], -torch.inf)
    inside = torch.einsum("abkgd,ackd->akgbc", grouped, own_k).float()
    shares = torch.cat((before, inside), -1).softmax(-1)
    mixed = torch.einsum("akgbn,nkd->abkgd", shares[..., : len(k)], v)
    mixed = mixed + torch.einsum("akgbc,ackd->abkgd", shares[..., len(k) :], own_v)
    return mixed.reshape(count, size, heads, dim)


def blocks(head: BlockHead, embedding: Tensor, example: Example, anchors: Tensor) -> Blocks:
    """What `run` takes of one sequence, for blocks that begin at `anchors` [A]."""
    shape = head.shape
    tokens = torch.full((len(anchors), shape.size), shape.mask, device=anchors.device)
    tokens[:, 0] = example.tokens[anchors]
    return head.context(example.taps), anchors, F.embedding(tokens, embedding)


def learn(
    head: BlockHead,
    embedding: Tensor,
    teacher: Teacher,
    examples: Sequence[Example],
    chance: torch.Generator,
    salt: int,
) -> Unrolled:
    """Run a batch, losses by place in the block; chance: where blocks begin.

    So many blocks that every place of the answers is guessed about once."""
    depth = head.shape.size - 1
    begun: list[Blocks] = []
    hidden: list[Tensor] = []
    known: list[Tensor] = []
    inside = torch.arange(depth, device=embedding.device)
    for example in examples:
        last = len(example.tokens) - 1
        span = last - 1 - example.first
        drawn = torch.randperm(span, generator=chance)[: -(-span // depth)]
        anchors = (drawn.sort().values + example.first + 1).to(embedding.device)  # [A]
        begun.append(blocks(head, embedding, example, anchors))
        # The distribution of the token behind a place is known at that place.
        places = anchors.unsqueeze(1) + inside  # [A, S]
        there = places < last
        places = places.clamp(max=last)
        hidden.append(example.hidden[places].float())
        known.append(example.known[places] & there)
    right = torch.cat(known)
    wanted = teacher(torch.cat(hidden).flatten(0, 1))
    picked = teacher.pick(wanted, salt)
    if picked is not None:
        wanted = wanted[:, picked.ids] * picked.weight
    out = head.run(begun)[:, 1:].flatten(0, 1)
    logits = head.logits(out, None if picked is None else picked.ids).float()
    if picked is not None:
        logits = logits + picked.weight.log()
    cross = -(wanted * logits.log_softmax(-1)).sum(-1).view(right.shape)
    agreed = (logits.argmax(-1) == wanted.argmax(-1)).view(right.shape) & right
    return Unrolled(
        (cross * right).sum(0), agreed.sum(0), torch.full((depth,), len(right)), right.sum(0)
    )


def block_lengths(
    head: BlockHead, embedding: Tensor, kept: Tensor, example: Example, depth: int, most: int = 64
) -> Tensor:
    """Right guesses in a row of a block from each trained place, [Q] int64; `most` at once.

    kept: [D] the head's target ids."""
    tokens = example.tokens
    depth = min(depth, head.shape.size - 1)
    anchors = torch.arange(example.first + 1, len(tokens) - 1, device=tokens.device)
    inside = torch.arange(1, depth + 1, device=tokens.device)
    lengths: list[Tensor] = []
    for begun in range(0, len(anchors), most):
        part = anchors[begun : begun + most]
        out = head.run([blocks(head, embedding, example, part)])[:, 1 : depth + 1]
        guesses = kept[head.logits(out).argmax(-1)]  # [A, S]
        places = part.unsqueeze(1) + inside
        right = guesses == tokens[places.clamp(max=len(tokens) - 1)]
        right &= places < len(tokens)
        lengths.append(right.long().cumprod(-1).sum(-1))
    return torch.cat(lengths)


def warm_block(
    head: BlockHead, target: TargetParts, kept: Tensor, examples: Sequence[Example], seed: int
) -> None:
    """Set all weights of `head`. kept: [D] target ids of its vocabulary.

    Output rows, final norm (calmer) and the last MLP's inner directions are the target's. Features
    become its final state, and the first layer's attention hands on what it sees of it; all else
    that writes to the residual stream begins at zero."""
    plain = head.shape.plain
    chance = torch.Generator().manual_seed(seed)
    tensors = {name: held.clone() for name, held in head.named().items()}
    features, usual = features_of(target, examples, plain.eps)
    tensors["fc.weight"] = features
    tensors["lm_head.weight"] = target.rows[kept]
    tensors["norm.weight"] = target.norm * UNSURE
    same = plain.intermediate == target.gate.shape[0]
    for i in range(head.shape.layers):
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            name = f"layers.{i}.{part}_proj.weight"
            drawn = torch.randn(tensors[name].shape, generator=chance)
            tensors[name] = drawn * plain.hidden**-0.5
        if same and i == head.shape.layers - 1:
            tensors[f"layers.{i}.mlp.gate_proj.weight"] = target.gate
            tensors[f"layers.{i}.mlp.up_proj.weight"] = calmed(target, examples)
            tensors[f"layers.{i}.post_attention_layernorm.weight"] = target.mlp_norm
    first = "layers.0.self_attn."
    tensors[first + "v_proj.weight"], tensors[first + "o_proj.weight"] = _handed_on(
        plain, features, examples
    )
    head.take(tensors, usual)


def _handed_on(
    plain: HeadShape, features: Tensor, examples: Sequence[Example]
) -> tuple[Tensor, Tensor]:
    """V and output projections that pass the main directions of the context on unchanged."""
    width = plain.kv_heads * plain.head_dim
    gram = torch.zeros(plain.hidden, plain.hidden, dtype=torch.float64)
    for example in examples:
        made = example.taps[example.first :].float() @ features.T
        context = F.rms_norm(made, (plain.hidden,), None, plain.eps).double()
        gram += context.T @ context
    main = torch.linalg.eigh(gram).eigenvectors[:, -width:].float()  # [H, kv width]
    main = F.pad(main, (width - main.shape[1], 0))  # heads may be wider than the target
    group = plain.heads // plain.kv_heads
    spread = main.view(plain.hidden, plain.kv_heads, 1, plain.head_dim) / group
    wide = spread.expand(-1, -1, group, -1).reshape(plain.hidden, -1)
    return main.T.contiguous(), wide


def block_config(shape: BlockShape, **more: Any) -> Mapping[str, Any]:
    """config.json of a head in z-lab's layout, with a vocabulary of its own."""
    plain = shape.plain
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": plain.hidden,
        "intermediate_size": plain.intermediate,
        "num_attention_heads": plain.heads,
        "num_key_value_heads": plain.kv_heads,
        "head_dim": plain.head_dim,
        "num_hidden_layers": shape.layers,
        "hidden_act": "silu",
        "rms_norm_eps": plain.eps,
        "rope_theta": plain.theta,
        "max_position_embeddings": plain.max_positions,
        "vocab_size": plain.vocab,
        "draft_vocab_size": plain.draft_vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": shape.size,
        # Ids of layer outputs: boundary b is the output of layer b - 1.
        "dflash_config": {
            "mask_token_id": shape.mask,
            "target_layer_ids": [tap - 1 for tap in plain.taps],
        },
        **more,
    }
