"""The transformer of target/model.py as compiled code: quantised weights, one call per forward.

`load_native` repacks a checkpoint's own quantisation for kernels/cpu; `NativeTransformer` stands
where a `Transformer` does. K and V are kept in float16 or, if asked, in eight bits. A token's bits
do not depend on what else a step computes (see kernels/cpu/csrc), so speculation on equals off here
as well. Knows tensor names and blocks; not how a product is computed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_void_p
from time import perf_counter

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.kernels.base import AttentionPlan
from spec_serve.kernels.cpu import native
from spec_serve.kernels.cpu.attention import NativePlan
from spec_serve.kernels.cpu.native import Arena, PackedMatrix, Pool
from spec_serve.kernels.cpu.quantise import QUANTISERS
from spec_serve.target.config import ConfigError, ModelConfig, RopeConfig
from spec_serve.target.model import Progress, TargetOut, layout
from spec_serve.target.rope import inverse_frequencies
from spec_serve.target.weights import Checkpoint

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
SCALE_BYTES = 4
PLAIN_AS = "Q8_0"  # how a quantised file's few plain matrices are held


class Pace:
    """All threads or one: whichever makes steps quicker now.

    Threads that wait for each other hundreds of times a step lose many times what they gain as soon
    as another program wants one of the cores. So now and then a step is run the other way, and the
    quicker way is kept. No bit depends on it.
    """

    EVERY = 128  # steps from one try of the other way to the next

    def __init__(self, threads: int) -> None:
        self.all = self.using = threads
        self._steps = 0
        self._pace: dict[int, float] = {}  # seconds of a step over its weight, lately

    def choose(self) -> int:
        """Threads for the next step."""
        self._steps += 1
        if self.all == 1 or self.using not in self._pace:
            return self.using
        other = 1 if self.using == self.all else self.all
        return other if other not in self._pace or self._steps % self.EVERY < 2 else self.using

    def learn(self, threads: int, nodes: int, seconds: float) -> None:
        """What a step took."""
        if self.all == 1:
            return
        weighed = seconds / (4 + nodes)
        earlier = self._pace.get(threads)
        if earlier is None or (threads != self.using and weighed < earlier):
            self._pace[threads] = weighed  # other programs only ever make a step slower
        else:
            self._pace[threads] = earlier + 0.2 * (weighed - earlier)
        other = 1 if self.using == self.all else self.all
        if other in self._pace and self._pace.get(self.using, 0.0) > 1.1 * self._pace[other]:
            self.using = other


class NativeTransformer:
    """A decoder-only transformer in compiled code, for inference on a CPU."""

    def __init__(
        self, config: ModelConfig, pool: Pool, isa: str, kv: torch.dtype = torch.float16
    ) -> None:
        self.config = config
        self.dtype = kv  # of K and V
        self.device = torch.device("cpu")
        self.isa = isa
        self.quantisation = ""  # the commonest type of the matrices
        self.nbytes = 0
        self._pool = pool
        self.pace = Pace(pool.threads)
        self._kept: list[object] = []  # what the library points to
        self._model = native.Model()
        self._step = native.Step()
        self._positions = 0  # that the rotation tables reach
        self._rope: list[Tensor] = []
        self._runner = 0
        self._free: Callable[[], object] = lambda: None
        self._layers: tuple[Sequence[LayerKV], object, object] | None = None

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """K/V each layer keeps per token; behind codes of eight bits lies their scale, a float."""
        config = self.config
        width = config.head_dim + (SCALE_BYTES if self.dtype == torch.int8 else 0)
        return (KVSpec(config.kv_heads, width, self.dtype),) * config.layers

    @property
    def precision(self) -> str:
        """What the weights are, for people."""
        return self.quantisation.lower()

    @property
    def matrices(self) -> list[PackedMatrix]:
        """Embedding, head where it is another, then q, k, v, output, gate, up, down per layer."""
        return [kept for kept in self._kept if isinstance(kept, PackedMatrix)]

    @property
    def planes(self) -> int:
        """Planes of eight bits that activations are held in."""
        return int(self._model.planes)

    @property
    def raw(self) -> native.Model:
        """What the library reads; drafting heads borrow matrices of it."""
        return self._model

    @property
    def pool(self) -> Pool:
        """The threads, which drafting heads share."""
        return self._pool

    @property
    def threads(self) -> int:
        """Threads that run a forward."""
        return self._pool.threads

    def use_threads(self, threads: int) -> None:
        """Run forwards on so many threads from now on."""
        if threads != self._pool.threads:
            self._free()
            self._pool = Pool(threads)
            self.pace = Pace(threads)
            self._start()

    def _start(self) -> None:
        library = native.load()
        made = library.spec_native_runner(self._model, self.isa.encode(), self._pool.handle)
        assert made, self.isa
        self._runner = made
        self._free = weakref.finalize(self, library.spec_native_runner_free, made)

    def _reach(self, positions: int) -> None:
        """Rotation tables for so many positions, [positions, head_dim]: cosines, then sines."""
        if positions <= self._positions:
            return
        config = self.config
        count = min(max(positions, 2 * self._positions, 512), max(positions, config.max_context))
        self._rope = []
        for rope in (config.rope, config.local_rope):
            if rope is None:
                break
            self._rope.append(rotation_table(rope, config.head_dim, count))
        self._positions = count
        self._model.rope = self._rope[0].data_ptr()
        self._model.local_rope = self._rope[1].data_ptr() if len(self._rope) > 1 else None

    def _pointers(self, layers: Sequence[LayerKV]) -> tuple[object, object]:
        """Arrays of the layers' K and V pointers; made anew only for another pool."""
        # By identity, and held: another pool may lie at the address of one that is gone.
        if self._layers is None or self._layers[0] is not layers:
            assert all(kv.k.dtype == self.dtype for kv in layers)
            kind = c_void_p * len(layers)
            keys = kind(*(kv.k.data_ptr() for kv in layers))
            self._layers = (layers, keys, kind(*(kv.v.data_ptr() for kv in layers)))
        return self._layers[1:]

    def forward(
        self,
        batch: TreeBatch,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: tuple[int, ...] = (),
    ) -> TargetOut:
        """Run a batch, writing the nodes' K/V into `layers` (one per block) at batch.slots.

        plan: of kernels/cpu's backend. taps: boundaries wanted, in the order in which they are
        returned; ValueError outside 0..L.
        """
        config = self.config
        wanted = batch.logits_at.shape[0]
        logits = torch.empty(wanted, -(-config.vocab // native.ROWS) * native.ROWS)
        self._step.logits_out, self._step.chosen_out = logits.data_ptr(), None
        tapped, hidden = self._run(batch, layers, plan, taps)
        return TargetOut(logits[:, : config.vocab], tapped, hidden)

    def choose(
        self,
        batch: TreeBatch,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: tuple[int, ...] = (),
        limit: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, but instead of logits the likeliest token of each place, [M] int64: the
        lowest id among equals, below `limit` if that is not 0. Logits are never held."""
        chosen = torch.empty(batch.logits_at.shape[0], dtype=torch.int64)
        self._step.logits_out, self._step.chosen_out = None, chosen.data_ptr()
        self._step.limit = min(limit or self.config.vocab, self.config.vocab)
        return chosen, self._run(batch, layers, plan, taps)[0]

    def _run(
        self,
        batch: TreeBatch,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: tuple[int, ...],
    ) -> tuple[Tensor | None, Tensor]:
        """Taps and hidden states; what is made of the latter was written into the step before."""
        config = self.config
        for tap in taps:
            if not 0 <= tap <= config.layers:
                raise ValueError(f"taps: boundary {tap} is outside 0..{config.layers}")
        assert isinstance(plan, NativePlan), "this model needs the backend of kernels/cpu"
        nodes, wanted = len(batch), batch.logits_at.shape[0]
        self._reach(int(batch.positions.max()) + 1)
        hidden = torch.empty(wanted, config.hidden)
        tapped = torch.empty(nodes, len(taps) * config.hidden) if taps else None
        step, table = self._step, plan.table
        step.nodes, step.rows, step.logits = nodes, batch.rows, wanted
        step.words, step.table_stride = batch.ancestors.shape[1], table.stride(0)
        step.first = plan.first
        for name in (
            "tokens", "positions", "slots", "row_of", "ancestors", "logits_at", "node_ptr",
            "twig_ptr", "twig_slots", "row_ids", "prefix", "chain",
        ):  # fmt: skip
            setattr(step, name, _whole(getattr(batch, name)))
        step.table = table.data_ptr()
        k, v = self._pointers(layers)
        step.k, step.v = ctypes.cast(k, c_void_p), ctypes.cast(v, c_void_p)  # type: ignore[arg-type]
        wishes = (c_int32 * max(len(taps), 1))(*taps)
        step.taps, step.tap_count = ctypes.cast(wishes, c_void_p), len(taps)
        step.tapped = None if tapped is None else tapped.data_ptr()
        step.hidden_out = hidden.data_ptr()
        step.threads = self.pace.choose()
        begun = perf_counter()
        if native.load().spec_native_forward(self._runner, step):
            raise MemoryError("no memory for a step of the compiled model")
        self.pace.learn(step.threads, nodes, perf_counter() - begun)
        return tapped, hidden


def rotation_table(rope: RopeConfig, dim: int, positions: int) -> Tensor:
    """[positions, dim]: cosines of the half, then sines."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, dim)
    )
    return torch.cat((angles.cos(), angles.sin()), 1).mul_(rope.attention_factor).contiguous()


def _whole(tensor: Tensor) -> int:
    assert tensor.is_contiguous() and tensor.dtype == torch.int64
    return tensor.data_ptr()


def unfit(checkpoint: Checkpoint, quantize: str = "none") -> str:
    """Why a checkpoint can't run as compiled code; "" if it can."""
    try:
        native.load()
    except native.NativeUnavailable as error:
        return f"compiled kernels: {error}"
    config = ModelConfig.from_checkpoint_config(checkpoint.config)
    if config.experts is not None:
        return "a mixture of experts"
    if config.latent is not None:
        return "latent attention"
    shapes = layout(checkpoint, config).shapes
    kinds = {checkpoint.kind(name) for name, shape in shapes.items() if len(shape) == 2}
    if quantize == "none" and not kinds & set(native.FORMS):
        return "the weights are not quantised"
    if other := sorted(kinds - set(native.FORMS) - {"F32", "F16", "BF16"}):
        return f"{other[0]}: not a quantisation of the kernels"
    group, rest = divmod(config.heads, config.kv_heads)
    if rest or group > native.MOST_GROUP:
        return f"{config.heads} query heads over {config.kv_heads} K/V heads"
    if config.head_dim % 16 or config.head_dim > native.MOST_DIM:
        return f"heads of {config.head_dim}"
    q = config.heads * config.head_dim
    for inputs in (config.hidden, config.intermediate, q):
        if inputs % native.BLOCK:
            return f"matrices of {inputs} inputs"
    if config.intermediate % native.ROWS or (config.kv_heads * config.head_dim) % native.ROWS:
        return "matrices whose parts are no multiple of 16"
    return ""


class _Builder:
    """Reads and repacks, tensor by tensor."""

    def __init__(
        self, checkpoint: Checkpoint, model: NativeTransformer, pool: Pool, quantize: str,
        progress: Progress | None, total: int,
    ) -> None:  # fmt: skip
        self._checkpoint, self._model, self._pool = checkpoint, model, pool
        self._quantize = quantize.upper() if quantize != "none" else ""
        self._progress, self._total, self._done = progress, total, 0
        self._arena = Arena()
        self.kinds: dict[str, int] = {}

    def packed(self, name: str, bias: str | None = None) -> PackedMatrix:
        """A matrix in the kernels' layout."""
        outputs, inputs = self._checkpoint.shape(name)
        kind = self._checkpoint.kind(name)
        rows = None
        if kind in native.FORMS:
            raw, rows = self._checkpoint.encoded(name)
        else:
            kind = self._quantize or PLAIN_AS
            raw = QUANTISERS[kind](self._checkpoint.tensor(name, torch.float32))
        held = None if bias is None else self._checkpoint.tensor(bias, torch.float32)
        made = PackedMatrix(kind, raw, outputs, inputs, self._pool, held, rows, self._arena)
        self.kinds[kind] = self.kinds.get(kind, 0) + outputs * inputs
        self._model.nbytes += made.nbytes
        self._model._kept.append(made)
        self._done += outputs * inputs
        if self._progress is not None:
            self._progress(self._done, self._total)
        return made

    def stack(self, layer: str, names: Sequence[str], bias: bool) -> native.Stack:
        """Matrices one below the other."""
        parts = [
            self.packed(f"{layer}{name}.weight", f"{layer}{name}.bias" if bias else None)
            for name in names
        ]
        return self.stacked(parts)

    def stacked(self, parts: Sequence[PackedMatrix]) -> native.Stack:
        """The same of matrices that are there."""
        array = (native.Matrix * len(parts))(*(part.matrix for part in parts))
        self._model._kept.append(array)
        return native.Stack(array, len(parts))

    def vector(self, name: str) -> int:
        """Address of a norm's weights in float32, with 1 added where the family does."""
        held = self._checkpoint.tensor(name, torch.float32).contiguous()
        if self._model.config.zero_centred:
            held = held + 1.0
        self._model._kept.append(held)
        self._model.nbytes += held.numel() * 4
        return held.data_ptr()


def load_native(
    checkpoint: Checkpoint,
    threads: int = 0,
    quantize: str = "none",
    progress: Progress | None = None,
    isa: str = "auto",
    activations: int = 16,
    kv: torch.dtype = torch.float16,
) -> NativeTransformer:
    """Build the model a checkpoint describes from its quantised weights.

    threads: 0 = as many as torch has. quantize: how plain weights are held ("q8_0", "q4_0", ...).
    activations: bits they are rounded to for the products, 8 or 16. kv: of K and V, float16 or
    int8 with a scale per token and head.
    Raises ConfigError naming the tensor or the reason (see `unfit`).
    """
    if reason := unfit(checkpoint, quantize):
        raise ConfigError(reason)
    config = ModelConfig.from_checkpoint_config(checkpoint.config)
    pool = Pool(threads or torch.get_num_threads())
    model = NativeTransformer(config, pool, native.isa(isa), kv)
    found = layout(checkpoint, config)
    prefix = found.prefix
    total = sum(shape[0] * shape[1] for shape in found.shapes.values() if len(shape) == 2)
    builder = _Builder(checkpoint, model, pool, quantize, progress, total)
    packed = builder.packed(prefix + "embed_tokens.weight")
    raw = model._model
    raw.embedding = packed.matrix
    raw.head = builder.stacked([packed if found.head is None else builder.packed(found.head)])
    raw.norm = builder.vector(prefix + "norm.weight")
    layers = (native.Layer * config.layers)()
    for i in range(config.layers):
        _fill(layers[i], config, builder, f"{prefix}layers.{i}.", i)
    model._kept.append(layers)
    raw.layers, raw.count = layers, config.layers
    raw.hidden, raw.intermediate, raw.vocab = config.hidden, config.intermediate, config.vocab
    raw.heads, raw.kv_heads, raw.head_dim = config.heads, config.kv_heads, config.head_dim
    raw.planes = activations // 8
    raw.kv_eight = int(kv == torch.int8)
    raw.activation = ACTIVATIONS[config.activation]
    raw.eps, raw.attention_scale = config.eps, config.attention_scale
    raw.attention_softcap = config.attention_softcap or 0.0
    raw.logit_softcap = config.logit_softcap or 0.0
    raw.embed_scale = config.embed_scale
    model.quantisation = max(builder.kinds, key=lambda kind: builder.kinds[kind])
    model._reach(1)
    model._start()
    return model


def _fill(layer: native.Layer, config: ModelConfig, builder: _Builder, name: str, i: int) -> None:
    attention, mlp = "self_attn.", "mlp."
    layer.qkv = builder.stack(
        name, [f"{attention}{part}_proj" for part in "qkv"], config.qkv_bias
    )
    layer.out = builder.stack(name, [attention + "o_proj"], config.o_bias)
    layer.gate_up = builder.stack(name, [mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias)
    layer.down = builder.stack(name, [mlp + "down_proj"], config.mlp_bias)
    layer.attention_norm = builder.vector(name + "input_layernorm.weight")
    after = name + "post_attention_layernorm.weight"
    if config.sandwich_norms:
        layer.after_attention = builder.vector(after)
        layer.mlp_norm = builder.vector(name + "pre_feedforward_layernorm.weight")
        layer.after_mlp = builder.vector(name + "post_feedforward_layernorm.weight")
    else:
        layer.mlp_norm = builder.vector(after)
    if config.qk_norm:
        layer.q_norm = builder.vector(name + attention + "q_norm.weight")
        layer.k_norm = builder.vector(name + attention + "k_norm.weight")
    layer.window = config.windows[i] or 0
    layer.local = int(config.windows[i] is not None and config.local_rope is not None)
