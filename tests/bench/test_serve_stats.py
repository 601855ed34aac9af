"""Figures, schedules, data sets and plots of `bench serve`, on values worked out by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from spec_serve.bench import plots
from spec_serve.bench.serve_ask import Outcome
from spec_serve.bench.serve_data import Question, load
from spec_serve.bench.serve_html import Part, page, per_second
from spec_serve.bench.serve_load import Load, schedule
from spec_serve.bench.serve_stats import (
    Slo,
    at_once,
    chunk_gaps_ms,
    figures,
    good,
    mean_itl_ms,
    percentile,
    spread,
    steady,
    token_gaps_ms,
    ttft_ms,
)


def outcome(**fields: Any) -> Outcome:
    """Due at 1 s, sent 10 ms later; chunks of 1, 4 and 1 tokens."""
    made = Outcome(
        0, "chat", due=1.0, sent=1.01, ended=1.5, arrivals=[(1.2, 1), (1.3, 4), (1.4, 1)],
        prompt_tokens=10, cached_tokens=5, tokens=6, steps=3, drafted=9, accepted=3,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_times_of_an_answer() -> None:
    one = outcome()
    assert ttft_ms(one) == pytest.approx(200)
    assert chunk_gaps_ms(one) == pytest.approx([100, 100])
    assert token_gaps_ms(one) == pytest.approx([25] * 4 + [100])
    assert mean_itl_ms(one) == pytest.approx(40)
    assert good(one, Slo(201, 41)) and not good(one, Slo(199, 41)) and not good(one, Slo(201, 39))
    assert not good(outcome(code="overloaded"), Slo())
    assert not good(outcome(left=True), Slo())


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([], 0.5) == 0.0 and percentile([7.0], 0.99) == 7.0
    assert spread([3.0, 1.0]) == {
        "mean": 2.0, "p50": 1.0, "p90": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0
    }  # fmt: skip


def test_figures_of_a_load() -> None:
    outcomes = [
        outcome(due=i * 0.1, sent=i * 0.1, ended=i * 0.1 + 0.5,
                arrivals=[(i * 0.1 + 0.2, 1), (i * 0.1 + 0.3, 4), (i * 0.1 + 0.4, 1)])
        for i in range(101)
    ]  # fmt: skip
    assert steady(outcomes) == pytest.approx((0.5, 10.0))
    outcomes.append(outcome(code="overloaded", due=5.0, sent=5.0, ended=5.02, arrivals=[]))
    made = figures(outcomes, Slo(250, 41))
    assert (made["requests"], made["answered"], made["errors"]) == (102, 101, {"overloaded": 1})
    assert made["requests_per_s"] == pytest.approx(10, rel=0.02)
    assert made["goodput_per_s"] == pytest.approx(10, rel=0.02)
    assert made["tokens_per_s"] == pytest.approx(60, rel=0.02)
    assert made["good_share"] == pytest.approx(101 / 102)
    assert made["refused_ms"]["max"] == pytest.approx(20)
    assert made["acceptance"] == pytest.approx(1 / 3)
    assert made["tokens_per_step"] == 2 and made["tokens_per_chunk"] == 2
    assert made["cached_share"] == 0.5
    assert made["most_at_once"] == 6
    assert figures(outcomes, Slo(150, 41))["goodput_per_s"] == 0
    json.dumps(made)


def test_a_load_without_answers_has_figures() -> None:
    made = figures([outcome(code="connection_lost", arrivals=[])], Slo())
    assert (made["answered"], made["requests_per_s"], made["acceptance"]) == (0, 0.0, None)
    assert figures([], Slo())["requests"] == 0


def test_at_once() -> None:
    two = [outcome(sent=0.0, ended=2.0), outcome(sent=1.0, ended=3.0)]
    assert at_once(two) == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0)]


def test_schedules() -> None:
    even = schedule(Load(10, seconds=1, arrival="even"))
    assert even == pytest.approx([i / 10 for i in range(10)])
    poisson = schedule(Load(100, seconds=50, seed=3))
    assert 4700 < len(poisson) < 5300 and poisson == sorted(poisson) and poisson[-1] < 50
    gaps = [b - a for a, b in zip(poisson, poisson[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # as exponential gaps have it
    assert poisson == schedule(Load(100, seconds=50, seed=3))
    assert poisson != schedule(Load(100, seconds=50, seed=4))
    bursts = schedule(Load(100, seconds=50, arrival="bursts", burst=5))
    assert 4300 < len(bursts) < 5700 and len(set(bursts)) * 5 == len(bursts)
    assert len(schedule(Load(100, seconds=50, requests=7))) == 7


def test_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "a", "max_tokens": 7},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"question_id": 1, "category": "qa", "turns": ["first", "second"]},
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    one, two, three, four = load([str(path)])
    assert one == Question("mine", prompt="a", max_tokens=7)
    assert two.messages[1] == {"role": "user", "content": "u"}
    assert three == Question("qa", ({"role": "user", "content": "first"},))
    assert four == Question("humaneval", prompt="def f():")
    assert load([str(path)], raw=True)[1].prompt == "s\n\nu"
    assert len({question.category for question in load([])}) > 5
    for bad in ("{", "[]", "{}", '{"prompt": 3}', '{"turns": []}', '{"messages": [1]}',
                '{"prompt": "a", "max_tokens": 0}'):  # fmt: skip
        path.write_text(f'{{"prompt": "a"}}\n{bad}\n')
        with pytest.raises(ValueError, match="mine.jsonl, line 2"):
            load([str(path)])
    path.write_text("")
    with pytest.raises(ValueError, match="no prompts"):
        load([str(path)])
    with pytest.raises(OSError):
        load([str(tmp_path / "none")])


def test_ticks_are_round() -> None:
    assert plots.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert plots.ticks(0.0, 0.23) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert plots.ticks(3, 3) == [3]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(0.0, 0.0), (1e-9, 5.0), (1e6, -2.0)]])
def test_plots_are_svg_within_their_frame(points: list[plots.Point], log: bool) -> None:
    for kind in ("line", "step", "dots"):
        drawn = plots.chart("a < b", {"s": points, "t": points}, "x", "y", kind=kind, log_x=log)  # type: ignore[arg-type]
        tree = ET.fromstring(drawn)
        assert tree.get("aria-label") == "a < b"
        for dot in tree.iter("circle"):
            assert 0 <= float(dot.get("cx", "")) <= plots.WIDTH
            assert 0 <= float(dot.get("cy", "")) <= plots.HEIGHT
        assert len([*tree.iter("circle")]) >= len(points) * (kind != "step")


def test_shares() -> None:
    assert plots.shares([3.0, 1.0]) == [(1.0, 50.0), (3.0, 100.0), (3.0, 100.0)]
    assert plots.shares([]) == [] and len(plots.shares([1.0] * 10_000)) < 320


def test_the_page_holds_everything_itself() -> None:
    outcomes = [outcome(), outcome(category="<b>", code="timeout")]
    parts = [
        Part(f"load {rate}", {"rate": rate, **figures(outcomes, Slo())}, outcomes)
        for rate in (1.0, 2.0)
    ]
    made = page({"url": "<script>"}, parts, Slo(), "found it")
    assert "http://" not in made.replace("http-equiv", "") and "src=" not in made
    assert "&lt;script&gt;" in made and "<script" not in made and "&lt;b&gt;" in made
    assert made.count("<svg") == 4 + 2 * 6 and "found it" in made
    assert per_second(outcomes[:1]) == [(0.0, 0.0), (1.0, 6.0)]
