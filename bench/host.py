"""Host time per step: what the engine's own Python costs, measured with a device that does nothing.

The fake device answers at once with fixed tokens, so that everything measured is scheduling,
building jobs, bookkeeping of the cache and events. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import gc
from statistics import median
from time import perf_counter

from spec_serve.bench.report import table, write_json
from spec_serve.cache.batch import build_batch
from spec_serve.cache.store import KVStore
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.make import Lookups
from spec_serve.spec.admission import EngineInfo, Limits
from spec_serve.spec.build import Builder
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Mode, Request, Sampling, Speculation, Stopping
from spec_serve.spec.scheduler import Scheduler
from spec_serve.spec.step import Job, Result

VOCAB = 32_000


class FakeDevice:
    """Builds the batch as a real device would, and then accepts nothing and emits a fixed token.

    busy: microseconds spent inside, which are not host time.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self._token = 0

    def step(self, job: Job) -> Result:
        """Answer at once."""
        begun = perf_counter()
        build_batch(job.twigs)
        self.busy += perf_counter() - begun
        self._token = self._token % 997 + 3
        bonus = [-1 if token >= 0 else self._token + b for b, token in enumerate(job.next_tokens)]
        return Result([[] for _ in job.twigs], bonus)


def fake_engine(rows: int, device: FakeDevice, mode: Mode, max_nodes: int = 16) -> Engine:
    """An engine of `rows` rows on the fake device; with look-ups unless mode is "off"."""
    slots = rows * 4096
    store = KVStore(slots, rows, None)
    lookups = Lookups(store)
    builder = Builder(
        store,
        CostCurve([(1, 10.0), (8, 12.0), (64, 40.0)]),
        None,
        None,
        lambda row: lookups.sources(row.request.salt, row.tokens, (), row.prompt_len),
        lookups.retired,
        mode,
        max_nodes,
    )
    info = EngineInfo(
        "fake", "", VOCAB, 4096, slots, rows, "float32", "none", max_nodes,
        ("prediction", "suffix", "radix", "shared"),
    )  # fmt: skip
    return Engine(info, Limits(), device, store, Scheduler(rows, 512, 128), builder)


def measure(rows: int, mode: Mode, steps: int) -> dict[str, float]:
    """Median and p99 of host microseconds per step (batch packing apart, then included)."""
    device = FakeDevice()
    engine = fake_engine(rows, device, mode)
    for i in range(rows):
        engine.submit(
            Request(
                f"r{i}",
                [5 + (i * 7 + j) % 900 for j in range(64)],
                Sampling(),
                Stopping(max_tokens=steps + 64),
                Speculation(mode=mode),
            )
        )
    while any(row.emitted < 16 for row in engine.scheduler.rows()):
        engine.step()
    gc.collect()
    gc.disable()
    apart: list[float] = []
    whole: list[float] = []
    for _ in range(steps):
        before = device.busy
        begun = perf_counter()
        engine.step()
        took = perf_counter() - begun
        whole.append(took * 1e6)
        apart.append((took - (device.busy - before)) * 1e6)
    gc.enable()
    apart.sort()
    return {
        "host_us": median(apart),
        "host_p99_us": apart[int(len(apart) * 0.99)],
        "with_packing_us": median(whole),
    }


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    parser = argparse.ArgumentParser(prog="spec-serve bench host", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", default="", help="write the figures to this file")
    args = parser.parse_args(argv)
    records = []
    modes: tuple[Mode, ...] = ("off", "auto")
    for mode in modes:
        for rows in args.rows:
            records.append({"speculation": mode, "rows": rows, **measure(rows, mode, args.steps)})
    table(records)
    write_json(args.json, {"bench": "host", "records": records})
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
