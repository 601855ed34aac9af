"""`bench gpu` rehearsed on a CPU, and every Triton program compiled for a GPU that isn't here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_serve.bench import gpu

pytest.importorskip("triton")


def test_sections_run_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    given = ["--small", "--device", "cpu", "--attention", "torch", "--repeat", "1"]
    sections = ["correct", "attention", "steps", "draw", "quantised", "gaps", "served"]
    line = [*given, "--json", str(path), "--models", "Qwen3-8B", "--sections", *sections]
    assert gpu.main(line) == 0
    report = json.loads(path.read_text())
    assert [row["good"] for row in report["correct"]] == ["yes", "yes"]
    assert {row["nodes"] for row in report["attention"]} == {1, 8}
    rows = report["steps Qwen3-8B"]
    assert [(row["rows"], row["nodes"]) for row in rows] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert all(row["ms"] > 0 and row["of reading weights"] > 0 for row in rows)
    assert [row["equal"] for row in report["draw"]] == [1.0] and not report["cut short"]
    quantised = [(row["kind"], row["rows"], row["good"]) for row in report["quantised"]]
    assert quantised[1::2] == [("int4", 3, "yes"), ("int8", 3, "yes"), ("fp8", 3, "yes")]
    # The oracle's guesses are right as often as it means them to be, seven a step.
    speeds = {(row["rows"], row["guesses"]): row for row in report["served Qwen3-8B"]}
    assert speeds[1, "off"]["tokens/step/row"] == 1.0 and speeds[1, "oracle"]["tokens/s"] > 0
    assert speeds[1, "oracle"]["tokens/step/row"] > 2 < speeds[2, "oracle"]["tokens/step/row"]
    assert [row["graphs"] for row in report["gaps Qwen3-8B"]] == ["yes", "no"] * 2
    assert "GB/s" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu"]) == 2
    assert "no GPU" in capsys.readouterr().out


def test_shapes_are_those_of_the_models() -> None:
    import torch

    sizes = {}
    for name, config in (gpu.MODELS | gpu.MIXTURES).items():
        held = gpu.Random(config, torch.device("cpu")).shapes()
        sizes[name] = sum(torch.Size(shape).numel() for shape in held.values()) / 1e9
    known = {"Llama-3-8B": 8.03, "Qwen3-8B": 8.19, "Qwen2.5-1.5B": 1.54}
    known |= {"Qwen3-30B-A3B": 30.53, "DeepSeek-V2-Lite": 15.71}
    assert sizes == pytest.approx(known, abs=0.01)


def test_every_program_compiles(tmp_path: Path) -> None:
    """Down to machine code, in a process without the interpreter; attention without spilling."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    path = tmp_path / "made.json"
    code = "import sys; from spec_serve.bench import gpu; sys.exit(gpu.main(sys.argv[1:]))"
    line = ["--small", "--device", "cpu", "--sections", "compile", "--json", str(path)]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *line], env=clean, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = json.loads(path.read_text())["compile"]
    assert len({row["program"] for row in rows}) >= 15
    plain = [row for row in rows if row["program"] == "attend_tile"][:2]
    assert [row["stack"] for row in plain] == [0, 0]
