"""`bench peers`: the protocol with fake engines, spec-serve itself on a tiny model, and the README.

The fakes are scripts of a few lines; no peer needs to be installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_serve.bench.peers import command, engines, show
from spec_serve.bench.peers.compare import Question, compare, speed
from spec_serve.bench.peers.engines import Chosen, Peer
from spec_serve.bench.peers.figures import categories, ratios, rows
from spec_serve.bench.peers.process import PeerError, PeerProcess
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
FAKE = """
import os, subprocess, sys, time
def load(options):
    print("a library says hello")
    if options["model"] == "broken":
        raise OSError("no such model")
    def ask(question):
        with open(options["model"], "a") as log:
            log.write(f"{NAME} {question['mode']} {len(question['ids'])}\\n")
        if question["mode"] == "bad" and question["max_tokens"] > 8:
            raise ValueError("can't do this")
        if question["mode"] == "dies":
            print("last words", flush=True)
            os._exit(3)
        if question["mode"] == "sleeps":
            child = subprocess.Popen(["sleep", "60"])
            with open(options["model"], "w") as log:
                log.write(str(child.pid))
            time.sleep(60)
        ids = [(RISE + i) % 7 for i in range(question["max_tokens"])]
        return {"ids": ids, "first_s": 0.5, "total_s": 0.5 + (len(ids) - 1) / SPEED}
    return ask, {"version": "1"}
"""


def fake(folder: Path, name: str, modes: tuple[str, ...], pace: float, rise: int = 0) -> Chosen:
    path = folder / f"{name}.py"
    path.write_text(f"NAME, SPEED, RISE = {name!r}, {pace}, {rise}\n{FAKE}")
    return Chosen(Peer(name, path, modes), modes, Path(sys.executable))


def compared(chosen: Sequence[Chosen], log: Path, said: list[str]) -> dict[str, Any]:
    asked = [Question("edit", [1] * 200), Question("chat", [2] * 20), Question("chat", [3] * 21)]
    found = compare(
        chosen, asked, {"model": str(log)}, max_tokens=32, repeats=2, timeout_s=60, say=said.append
    )
    return {
        "made": "2026-01-02T03:04:05", "target": "m.gguf", "draft": "",
        "machine": {"cpu": "A <fast> one", "cores": 2, "sets": "avx2", "memory_gib": 8.0,
                    "load": 0.5},
        "options": {"max_tokens": 32, "repeats": 2, "threads": 2}, **found,
    }  # fmt: skip


def test_engines_take_turns_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said: list[str] = []
    chosen = [
        fake(tmp_path, "spec-serve", ("off", "auto"), 200.0),
        fake(tmp_path, "llama.cpp", ("plain", "bad", "dies"), 50.0, rise=7),
        fake(tmp_path, "other", ("plain",), 100.0, rise=1),
    ]
    report = compared(chosen, log, said)
    # "dies" ends its process at the warm-up, and with it "plain" of the same process.
    assert report["order"] == ["spec-serve/off", "spec-serve/auto", "other/plain"]
    assert "can't do this" not in report["skipped"]["llama.cpp/dies"]
    assert "last words" in report["skipped"]["llama.cpp/dies"]
    assert "llama.cpp/plain" in report["skipped"]
    asked = [line.split()[0] + "/" + line.split()[1] for line in log.read_text().splitlines()]
    ours = [name for name in asked if not name.startswith("llama")]
    one = ["spec-serve/off", "spec-serve/auto", "other/plain"]
    turns = [one, one, one[1:] + one[:1], one[2:] + one[:2],
             one[1:] + one[:1], one[2:] + one[:2], one]  # fmt: skip
    assert ours == [name for turn in turns for name in turn]
    assert len(report["runs"]) == 2 * 3 * 3
    assert {run["same"] for run in report["runs"] if run["engine"] == "spec-serve/auto"} == {32}
    assert {run["same"] for run in report["runs"] if run["engine"] == "other/plain"} == {0}
    assert any(line.startswith("llama.cpp/dies: left out: it ended") for line in said)


def test_a_mode_that_fails_later_takes_its_figures_with_it(tmp_path: Path) -> None:
    report = compared([fake(tmp_path, "llama.cpp", ("plain", "bad"), 50.0)], tmp_path / "l", [])
    assert report["order"] == ["llama.cpp/plain"]
    assert report["skipped"]["llama.cpp/bad"].startswith("ValueError: can't do this")
    assert {run["engine"] for run in report["runs"]} == {"llama.cpp/plain"}


def test_a_model_that_does_not_load_leaves_the_engine_out(tmp_path: Path) -> None:
    (made,) = [fake(tmp_path, "x", ("plain",), 50.0)]
    found = compare([made], [Question("c", [1])], {"model": "broken"}, max_tokens=4, repeats=1)
    assert found["runs"] == [] and "no such model" in found["skipped"]["x"]
    assert "a library says hello" in found["skipped"]["x"]


def test_an_engine_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "child"
    chosen = fake(tmp_path, "x", ("sleeps",), 50.0)
    with PeerProcess("x", chosen.python, chosen.peer.runner, {"model": str(log)}) as process:
        process.load(60)
        log.write_text("")
        with pytest.raises(PeerError, match="no answer"):
            process.ask({"ids": [1], "mode": "sleeps", "max_tokens": 9}, 3)
    child = Path(f"/proc/{log.read_text()}/stat")

    def ended() -> bool:
        try:  # an orphan that nobody has collected yet is a zombie
            return child.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    end = time.monotonic() + 60  # a signal takes its time on a busy machine
    while not ended():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("peers")
    chosen = [
        fake(folder, "spec-serve", ("off", "auto"), 200.0),
        fake(folder, "llama.cpp", ("plain",), 50.0),
    ]
    return compared(chosen, folder / "log", [])


def test_figures(report: dict[str, Any]) -> None:
    made = rows(report)
    assert categories(report) == ["edit", "chat", "all"]
    assert [row.engine for row in made] == ["spec-serve/off", "spec-serve/auto", "llama.cpp/plain"]
    assert made[0].by["all"].speed == pytest.approx(200, rel=1e-3)
    assert made[0].prefill == pytest.approx(400)  # of the long prompt alone
    assert made[2].same == 1
    ratio, against = ratios(made, "spec-serve/auto", "llama.cpp/")["chat"]
    assert ratio == pytest.approx(4, rel=1e-3) and against == "llama.cpp/plain"
    assert ratios(made, "spec-serve/auto", "vllm") == {}


def test_the_median_is_over_prompts_and_the_spread_theirs(report: dict[str, Any]) -> None:
    run = dict(report["runs"][0], engine="e", category="c")
    runs = [
        dict(run, prompt=prompt, total_s=0.5 + 31 / pace)
        for prompt, paces in enumerate(([10, 20, 90], [40, 40, 40], [70, 60, 5]))
        for pace in paces
    ]
    (row,) = rows({"order": ["e"], "runs": runs})
    figure = row.by["c"]
    assert (round(figure.speed), round(figure.low), round(figure.high)) == (40, 20, 60)
    assert speed(dict(run, tokens=9, first_tokens=3, first_s=1.0, total_s=3.0)) == 3.0
    assert speed(dict(run, tokens=1)) == 0.0


def test_shown(report: dict[str, Any], tmp_path: Path) -> None:
    text = show.markdown([report, report])
    assert "| spec-serve auto | 200 | 200 | 200 | 400 | 100 % |" in text
    assert "| auto / its best | 4.00 × | 4.00 × | 4.00 × |  |  |" in text
    assert text.count("A <fast> one (2 cores, avx2, 8 GiB, load 0.5") == 2
    drawn = show.plot(report)
    assert drawn.count("<rect") == 9 and drawn.count('class="own"') == 6
    assert "A &lt;fast&gt;" in drawn
    readme = tmp_path / "R.md"
    readme.write_text(f"# x\n{show.BEGIN}\nold\n{show.END}\nmore\n")
    show.update(readme, text)
    assert readme.read_text() == f"# x\n{show.BEGIN}\n{text}\n{show.END}\nmore\n"
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="update-readme"):
        show.update(readme, text)


def test_shown_from_files(report: dict[str, Any], tmp_path: Path) -> None:
    held, table, plot = tmp_path / "a.json", tmp_path / "a.md", tmp_path / "a.svg"
    held.write_text(json.dumps(report))
    argv = ["--from-json", str(held), "--markdown", str(table), "--plot", str(plot)]
    assert command.main(argv) == 0
    assert table.read_text() == show.markdown([report]) + "\n"
    assert plot.read_text() == show.plot(report)


def test_the_readme_holds_what_the_committed_results_say() -> None:
    held = sorted((ROOT / "bench/peers/results").glob("*.json"))
    text = show.markdown([json.loads(path.read_text()) for path in held])
    readme = (ROOT / "README.md").read_text()
    assert f"{show.BEGIN}\n{text}\n{show.END}" in readme


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--engines", "tabby"], "engines: 'tabby' is none of"),
        (["--venv", "tabby=x"], "venv: there is no engine 'tabby'"),
        (["--venv", "tabby"], "venv: NAME=FOLDER"),
        (["--install", "spec-serve"], "install: 'spec-serve' is none of llama.cpp"),
        (["--repeats", "0"], "repeats: must be at least 1"),
        (["--from-json", "none.json"], "none.json"),
    ],
)
def test_mistakes_are_named(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    assert said in capsys.readouterr().err


def test_what_can_be_run_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    python = tmp_path / "v/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    venvs = {"vllm": str(tmp_path / "v"), "openvino": str(tmp_path / "none"),
             "llama.cpp": str(tmp_path / "none")}  # fmt: skip
    chosen, missing = engines.choose([], "", venvs)
    assert [(one.peer.name, one.modes) for one in chosen] == [
        ("spec-serve", ("off", "auto")),
        ("transformers", ("plain", "lookup")),  # no draft, no drafting with one
        ("vllm", ("plain",)),  # a process per mode
        ("vllm", ("lookup",)),
    ]
    assert chosen[2].python == python and sorted(missing) == ["llama.cpp", "openvino"]
    chosen, _ = engines.choose(["transformers/assisted", "spec-serve"], "small", venvs)
    assert [(one.peer.name, one.modes) for one in chosen] == [
        ("spec-serve", ("off", "auto")), ("transformers", ("assisted",)),
    ]  # fmt: skip
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    _, missing = engines.choose([], "", venvs)
    assert missing["transformers"] == "not installed (--install transformers)"


@pytest.mark.slow
def test_spec_serve_and_transformers_say_the_same(tmp_path: Path) -> None:
    """Both runners for real, on a tiny checkpoint in float32."""
    tiny.write_tiny_model_dir(tmp_path / "model")
    ids = [40 + i % 9 for i in range(40)]
    options = {"model": str(tmp_path / "model"), "draft": "", "own_draft": "lookup",
               "threads": 1, "context": 128, "eos": [0], "dtype": "float32"}  # fmt: skip
    python = Path(sys.executable)
    chosen = [
        Chosen(engines.OWN, engines.OWN.modes, python),
        Chosen(engines.PEERS[2], ("plain", "lookup"), python),
    ]
    found = compare(chosen, [Question("c", ids)], options, max_tokens=24, repeats=1)
    assert found["skipped"] == {}
    by = {run["engine"]: run for run in found["runs"]}
    assert {run["tokens"] for run in by.values()} == {24}
    assert by["spec-serve/auto"]["same"] == by["transformers/plain"]["same"] == 24
    assert all(0 < run["first_s"] <= run["total_s"] for run in by.values())
    assert torch.__version__ in found["engines"]["spec-serve"]["version"]
