"""The filter behind the cost curve stays sound over any run of timings."""

from __future__ import annotations

import math
import random

import pytest

from spec_serve.draft.cost import CostCurve


@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_known_stays_a_covariance(seed: int) -> None:
    """Long runs of one size broke its symmetry once, then `observe` took a root of less than 0."""
    drawn = random.Random(seed)
    curve = CostCurve([(1, 2.0), (2, 2.2), (4, 2.5), (8, 3.1)], 1e-4 * seed, 1e-3 * seed)
    n = 1
    for _ in range(9000):
        if drawn.random() < 1 / drawn.choice([5, 50, 500]):
            n = drawn.randint(1, 8)
        ms = 2 * math.exp(drawn.gauss(0, 0.3))
        curve.observe(n, ms, drawn.choice([0, 10, 150]), drawn.choice([1, 4]))
    doubt = curve._doubt
    for i, line in enumerate(doubt):
        for j, value in enumerate(line):
            assert value == pytest.approx(doubt[j][i], abs=1e-12)
            assert value**2 <= line[i] * doubt[j][j] + 1e-12


def test_a_clock_that_stood_still_divides_nothing_by_zero() -> None:
    curve = CostCurve([(1, 0.0), (2, 0.0), (8, 0.0)])
    curve.observe(1, 2.0)
    assert 0 < curve.at(1) <= curve.at(8)
