"""`bench kernels` on tiny models: the compiled part against ceilings, the torch part without them.

What is measured is looked at for its form and its arithmetic; no time is judged.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spec_serve.bench import compiled, kernels
from spec_serve.bench.compiled import Ceilings, higher
from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.kernels.cpu import ceilings
from spec_serve.kernels.cpu.attention import NativeAttention
from spec_serve.kernels.cpu.native import NativeUnavailable, Pool, load
from spec_serve.target.native import NativeTransformer, load_native
from tests.tiny import tiny_checkpoint, write_tiny_model_dir

try:
    load()
except NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def model() -> NativeTransformer:
    return load_native(tiny_checkpoint(), 1, "q8_0")


def test_more_small_products_than_floats() -> None:
    pool = Pool(1)
    assert ceilings.bandwidth(pool, 1 << 22, repeat=2) > 0
    for bits in (4, 8, ceilings.FLOATS):
        assert ceilings.arithmetic(pool, bits, repeat=2) > 0
    with pytest.raises(ValueError, match="isa: 'sse'"):
        ceilings.arithmetic(pool, 8, "sse")
    assert 1 << 28 <= ceilings.buffer_bytes() <= 1 << 30


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_of_a_stream_is_read(threads: int) -> None:
    ceilings.bandwidth(Pool(1), 1 << 12, repeat=1)  # declares the function's types
    library, pool = load(), Pool(threads)
    held = torch.zeros(threads * 256, dtype=torch.uint8)
    for at in range(0, held.numel(), 8):
        held[at] = 1  # the lowest byte of a number
    assert library.spec_native_stream(held.data_ptr(), held.numel(), pool.handle) == len(held) // 8


def test_the_better_measurement_counts() -> None:
    one = Ceilings(2, "avx2", 10.0, 5.0, 4.0, 3.0)
    other = Ceilings(2, "avx2", 9.0, 6.0, 5.0, 1.0)
    assert higher(one, other) == Ceilings(2, "avx2", 10.0, 6.0, 5.0, 3.0)
    assert (one.products(4), one.products(5)) == (5.0, 4.0)


def test_the_matrices_of_a_step(model: NativeTransformer) -> None:
    named = compiled.named(model)
    layers = model.config.layers
    assert [name for name, _ in named] == [*compiled.PARTS * layers, "head"]
    shapes = {name: (held.matrix.outputs, held.matrix.inputs) for name, held in named}
    config = model.config
    assert shapes["head"] == (config.vocab, config.hidden)
    assert shapes["q"] == (config.heads * config.head_dim, config.hidden)
    assert shapes["k"] == shapes["v"] == (config.kv_heads * config.head_dim, config.hidden)
    assert shapes["down"] == (config.hidden, config.intermediate)


def test_shares_of_the_ceilings(
    model: NativeTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Ceilings(1, model.isa, 1e9, 8e9, 4e9, 1e9)
    monkeypatch.setattr(
        compiled, "linear_s", lambda matrices, *rest: [1e-3] * len(matrices)
    )
    records = {record["part"]: record for record in compiled.operators(model, 4, found, 1)}
    gate, layers, config = records["gate"], model.config.layers, model.config
    work = 4 * layers * config.intermediate * config.hidden * model.planes
    assert gate["count"] == layers and gate["bits"] == 8
    assert gate["ms"] == pytest.approx(layers)
    assert gate["arithmetic"] == pytest.approx(work / (layers * 1e-3) / 4e9)
    nbytes = sum(held.nbytes for name, held in compiled.named(model) if name == "gate")
    assert gate["memory"] == pytest.approx(nbytes / (layers * 1e-3) / 1e9)


def test_attention_is_what_a_context_adds(
    model: NativeTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Ceilings(1, model.isa, 1e9, 8e9, 4e9, 2e9)
    took = {100: 5e-3, 0: 3e-3}
    monkeypatch.setattr(compiled, "forward_s", lambda model, n, context, repeat: took[context])
    record, config = compiled.attention(model, 4, 100, found, 1), model.config
    read = config.layers * 2 * config.kv_heads * config.head_dim * 100 * 2
    made = config.layers * 2 * config.heads * config.head_dim * 100 * 4
    assert record["ms"] == pytest.approx(2.0)
    assert record["memory"] == pytest.approx(read / 2e-3 / 1e9)
    assert record["arithmetic"] == pytest.approx(made / 2e-3 / 2e9)
    took[100] = 2e-3  # another program wanted the cores just then
    record = compiled.attention(model, 4, 100, found, 1)
    assert record["ms"] == pytest.approx(-1.0) and record["memory"] is record["GB/s"] is None


def test_the_rest_is_what_the_matrices_do_not_take(model: NativeTransformer) -> None:
    found = Ceilings(1, model.isa, 1e9, 8e9, 4e9, 1e9)
    records = compiled.curve(model, [1, 3], 5, found, 2)
    assert [record["nodes"] for record in records] == [1, 3]
    assert records[0]["ratio"] == 1
    for record in records:
        assert record["linear ms"] + record["rest ms"] == pytest.approx(record["forward ms"])
        assert record["step ms"] > 0


def test_another_pool_is_written_where_it_is(model: NativeTransformer) -> None:
    """A forward writes into the layers it is given, even if the first is one seen before."""
    pools = [KVPool(model.kv_specs, 8, 1, 8, model.device) for _ in range(2)]
    batch = build_batch([Twig(0, 0, chain([5], given=1), range(1, 2), 0)], model.device)
    plan = NativeAttention().plan(batch, pools[0].table)
    model.forward(batch, pools[0].layers, plan)
    before = pools[0].layers[1].k.clone()
    mixed = [pools[0].layers[0], *pools[1].layers[1:]]
    pools[0].layers[1].k.zero_()
    model.forward(batch, mixed, plan)
    assert torch.equal(mixed[1].k[1], before[1])
    assert not pools[0].layers[1].k.any()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model_dir(tmp_path / "m")
    argv = ["--target", str(tmp_path / "m"), "--quantize", "q8_0", "--threads", "1", "--curve", "1",
            "2", "--operators", "2", "--nodes", "1", "4", "--context", "8", "--repeat", "1",
            "--ceilings", "1", "--json", str(tmp_path / "j")]  # fmt: skip
    assert kernels.main(argv) == 0
    made = json.loads((tmp_path / "j").read_text())
    assert [record["nodes"] for record in made["curve"]] == [1, 2]
    assert [record["part"] for record in made["operators"]] == [
        *compiled.PARTS, "head", "attention",
    ]  # fmt: skip
    assert made["model"]["threads"] == 1 and len(made["ceilings"]) == 2
    assert [record["shape"] for record in made["records"]] == ["chain", "tree"]
    assert "1 threads: memory" in capsys.readouterr().out
    # In torch there are no compiled matrices to look at.
    assert kernels.main([*argv[:2], "--dtype", "float32", *argv[4:]]) == 0
    assert "curve" not in json.loads((tmp_path / "j").read_text())
