"""`spec-serve bench`: benches are found by name, and get the rest of the command line.

Runs none of the real ones; what they measure is tested elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from spec_serve.api import cli, cli_bench


def test_benches_on_disk_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).resolve().parents[2] / "bench"
    there = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text()}
    assert "host" in there
    there.add("peers")  # a package
    assert set(cli_bench.benches()) == there
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  host       Host time per step" in out


@pytest.mark.parametrize("argv", [[], ["fuel"], ["__init__"], ["report"]])
def test_without_a_bench_those_there_are_named(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "\n  host " in err
    assert all(f"there is no bench {name!r}" in err for name in argv)


def test_the_rest_of_the_line_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    fake = ModuleType("spec_serve.bench.host")

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    fake.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_serve.bench.host", fake)
    assert cli.main(["bench", "host", "--rows", "1", "--json", "x"]) == 3
    assert seen == [["--rows", "1", "--json", "x"]]
