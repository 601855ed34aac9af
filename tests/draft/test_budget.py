"""Cost curves, calibration, and how many guesses pay."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_serve.draft.base import Guess, Plan
from spec_serve.draft.budget import GAIN, Calibration, best_count
from spec_serve.draft.chooser import Chooser
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.mix import Candidates, Trust


def test_curve_interpolates_and_extrapolates_in_proportion() -> None:
    curve = CostCurve([(1, 10.0), (2, 12.0), (4, 20.0)])
    assert [curve.at(n) for n in (0, 1, 2, 3, 4, 8)] == [0.0, 10.0, 12.0, 16.0, 20.0, 40.0]


def test_curve_follows_live_timings_and_ignores_wild_ones() -> None:
    curve = CostCurve([(1, 10.0), (4, 20.0), (16, 40.0)])
    for _ in range(320):
        curve.observe(4, 30.0)
    assert curve.at(4) == pytest.approx(30.0, rel=0.1)
    before = curve.at(1)
    for _ in range(4):
        curve.observe(1, before * 1000)
    assert curve.at(1) < before * 2.5
    curve.observe(0, 5.0)
    curve.observe(10_000, 5.0)


@given(st.lists(st.floats(0.01, 0.98), max_size=30), st.integers(1, 8), st.integers(0, 20))
def test_best_count_is_the_best_of_all(chances: list[float], emitting: int, extra: int) -> None:
    reach = sorted(chances, reverse=True)
    curve = CostCurve([(1, 10.0), (2, 18.0), (8, 20.0), (16, 24.0), (32, 40.0), (64, 90.0)])
    given_ = emitting + extra
    best = best_count(reach, emitting, given_, curve)
    rates = [(emitting + sum(reach[:m])) / curve.at(given_ + m) for m in range(len(reach) + 1)]
    if best == 0:
        assert max(rates) <= rates[0] * GAIN * (1 + 1e-9)
    else:
        assert rates[best] == pytest.approx(max(rates))


def test_a_step_in_the_curve_is_jumped_when_enough_lies_behind_it() -> None:
    curve = CostCurve([(1, 10.0), (2, 20.0), (16, 21.0)])
    assert best_count([0.6], 1, 1, curve) == 0
    assert best_count([0.9, 0.8, 0.7, 0.6], 1, 1, curve) == 4


def test_calibration_moves_from_the_estimate_to_what_happens() -> None:
    calibration = Calibration()
    assert calibration.rate("a:1", 1, 0.9) == 0.9
    for i in range(200):
        calibration.observe("a:1", 1, i % 10 == 0)
    assert calibration.rate("a:1", 1, 0.9) == pytest.approx(0.1, abs=0.05)
    assert calibration.rate("a:1", 2, 0.9) == 0.9
    for _ in range(2000):
        calibration.observe("a:1", 1, True)
    assert calibration.rate("a:1", 1, 0.5) > 0.9


def test_trust_of_a_row() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    for _ in range(100):
        trust.observe(0.8, False)
    assert trust.factor == 0.25
    for _ in range(300):
        trust.observe(0.8, True)
    assert 1.1 < trust.factor < 1.3


def test_candidates_merge_by_prefix_and_trim_to_a_tree() -> None:
    calibration = Calibration()
    candidates = Candidates()
    candidates.add_tree([1, 2, 3], [-1, 0, -1], [-0.5, -1.0, -2.0], "head", calibration, 1.0, 8)
    candidates.add_guess(Guess([1, 2, 7], [0.9, 0.9, 0.9], "suffix:3"), calibration, 1.0, 8)
    candidates.add_guess(Guess([4], [0.05], "suffix:1"), calibration, 1.0, 8)
    candidates.settle()
    assert candidates.tokens == [1, 2, 3, 7, 4]
    assert candidates.parents == [-1, 0, -1, 1, -1]
    assert candidates.kinds[0].startswith("head:")
    assert candidates.reach[3] == pytest.approx(0.9**3)
    order = candidates.order()
    for size in range(len(order) + 1):
        tree, source = candidates.tree([50, 51], order[:size])
        tree.check()
        assert tree.given == 2 and len(tree) == 2 + size
        assert [candidates.tokens[i] for i in source] == list(tree.tokens[2:])


def test_candidates_stop_at_the_depth_allowed() -> None:
    candidates = Candidates()
    candidates.add_guess(Guess([1, 2, 3], [0.9] * 3, "s:1"), Calibration(), 1.0, 2)
    candidates.add_tree([1, 5, 6, 7], [-1, 0, 1, 2], [-0.1, -0.2, -0.3, -0.4], "h", Calibration(),
                        1.0, 2)  # fmt: skip
    assert max(candidates.depths) == 2
    assert candidates.tokens == [1, 2, 5]


def test_any_trim_of_random_candidates_is_closed_under_parents() -> None:
    chooser = random.Random(3)
    for _ in range(200):
        candidates = Candidates()
        for _ in range(chooser.randint(1, 4)):
            length = chooser.randint(1, 6)
            guess = Guess(
                [chooser.randrange(3) for _ in range(length)],
                [chooser.random() for _ in range(length)],
                "k:1",
            )
            candidates.add_guess(guess, Calibration(), 1.0, 8)
        candidates.settle()
        order = candidates.order()
        assert all(candidates.reach[a] >= candidates.reach[b] for a, b in pairwise(order))
        tree, _ = candidates.tree([9], order[: chooser.randint(0, len(order))])
        tree.check()


def test_a_drafter_that_does_not_pay_is_left_alone_and_tried_again() -> None:
    target = CostCurve([(1, 50.0), (2, 90.0), (16, 100.0)])
    draft = CostCurve([(1, 30.0), (16, 40.0)])
    calibration = Calibration()
    chooser = Chooser(target, draft, calibration, "d", 8)
    for depth in range(1, 5):
        for _ in range(100):
            calibration.observe("d", depth, False)
    plans = [chooser.plan(1) for _ in range(2000)]
    probes = sum(plan.nodes > 0 for plan in plans[100:])
    assert 0 < probes < 0.05 * len(plans)
    cheap = Chooser(target, CostCurve([(1, 1.0), (16, 2.0)]), Calibration(), "d", 8)
    assert cheap.plan(1).nodes > 0
    assert Chooser(target, None, calibration, "d", 8).plan(1) == Plan(0, 0, 0)
