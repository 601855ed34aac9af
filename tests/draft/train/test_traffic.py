"""Traffic on disk: a ring that keeps to its size, and how it is parted; which head is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_serve.draft.train.judge import verdict
from spec_serve.draft.train.traffic import FILES, Traffic, files, parted, read


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    ring = Traffic(folder, 4000)
    for i in range(100):
        ring.add([i, 1], [2] * 20, 0.5)
    ring.add([1] * 1000, [2], 0.0)  # larger than a file may be
    ring.close()
    assert sum(path.stat().st_size for path in files(folder)) <= 4000
    assert len(files(folder)) <= FILES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(folder))
    found = list(read(folder))
    assert 30 < len(found) < 100 and found[-1].number == 99
    assert [one.number for one in found] == list(range(found[0].number, 100))
    assert list(found[-1].prompt) == [99, 1] and found[-1].temperature == 0.5

    with files(folder)[-1].open("a") as out:
        out.write('{"n":100,"pro')  # cut short
    ring = Traffic(folder, 4000)
    ring.add([7], [8] * 9, 0.0)
    ring.close()
    assert list(read(folder))[-1].number == 100
    first, second, third = parted(list(read(folder)))
    numbers = [one.number for one in (*first, *second, *third)]
    assert numbers == sorted(numbers) and numbers[-1] == 100
    assert len(second) == len(third) >= 1 and len(first) > 4 * len(third)
    with pytest.raises(ValueError, match="too few"):
        parted(found[:9])


def test_better_means_by_more_than_chance() -> None:
    old = [(20, 10), (20, 12), (20, 11), (20, 10), (20, 13)]
    clear = verdict(old, [(20, 9), (20, 10), (20, 10), (20, 9), (20, 12)])
    assert clear.better and clear.served < clear.candidate and clear.answers == 5
    lucky = verdict(old, [(20, 4), (20, 12), (20, 12), (20, 11), (20, 14)])
    assert lucky.candidate > lucky.served and not lucky.better
    assert not verdict(old, old).better and "not better" in verdict(old, old).told()
