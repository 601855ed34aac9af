"""`spec-serve models`: what is listed, fetched, removed, converted and described.

Uses a model cache of its own and fetches nothing; how models are fetched is tested in tests/target.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from spec_serve.api import cli
from spec_serve.api.cli_models import shown, size_text
from spec_serve.target import hub

SHORT = "smollm2-135m-instruct"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched models; the hub's own cache is empty."""
    monkeypatch.setenv("SPEC_SERVE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", _no_cache)
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def _no_cache() -> None:
    raise OSError("no hub cache in this test")


def test_list_shows_what_is_here_and_what_can_be_had(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "list", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["local"] == []
    assert {m["name"] for m in held["available"]} == set(hub.short_names())
    file = models / f"{SHORT}.gguf"
    file.write_bytes(b"x" * 2048)
    assert cli.main(["models", "list", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["local"] == [{"name": SHORT, "bytes": 2048, "path": str(file)}]
    assert SHORT not in {m["name"] for m in held["available"]}
    assert cli.main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(hub.short_names())
    assert lines[0].split() == [SHORT, "2.0", "KiB", str(file)]
    assert all("models pull" in line for line in lines[1:])


def test_rm_removes_and_names_what_is_not_there(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = models / f"{SHORT}.gguf"
    file.write_bytes(b"x" * 2048)
    assert cli.main(["models", "rm", SHORT]) == 0
    assert capsys.readouterr().err == f"spec-serve: removed {SHORT}, 2.0 KiB freed\n"
    assert not file.exists()
    assert cli.main(["models", "rm", SHORT]) == 1
    assert f"error: {SHORT}" in capsys.readouterr().err


def test_pull_prints_where_the_model_is(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, bool]] = []

    def pull(name: str, *, progress: bool = True) -> Path:
        seen.append((name, progress))
        if name == "bad":
            raise hub.ModelNotFound("bad: can't be found")
        return models / name

    monkeypatch.setattr(hub, "pull", pull)
    assert cli.main(["models", "pull", "a", "b"]) == 0
    assert capsys.readouterr().out == f"{models / 'a'}\n{models / 'b'}\n"
    assert cli.main(["models", "pull", "bad", "--quiet"]) == 1
    assert capsys.readouterr().err == "spec-serve: error: bad: can't be found\n"
    assert seen == [("a", True), ("b", True), ("bad", False)]


def test_convert_gets_both_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[Path, Path]] = []
    fake = ModuleType("spec_serve.target.convert")
    fake.convert_to_safetensors = lambda *paths: seen.append(paths)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_serve.target.convert", fake)
    source, out = tmp_path / "in", tmp_path / "out"
    assert cli.main(["models", "convert", str(source), str(out)]) == 0
    assert seen == [(source, out)]
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize("argv", [[], ["burn"], ["rm"], ["info"], ["convert", "a"]])
def test_wrong_usage_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["models", *argv])
    assert end.value.code == 2
    assert "usage: spec-serve models" in capsys.readouterr().err


def test_values_are_shown_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30, 5 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB", "5120.0 GiB",
    ]  # fmt: skip
    assert shown("file_size", 2048) == "2.0 KiB"
    assert shown("parameters", 1234567) == "1,234,567"
    assert shown("chat_template", True) == "yes"
    assert shown("quantisation", {"Q4_K": 10, "F32": 2}) == "Q4_K: 10, F32: 2"
    assert shown("x", [1, None]) == "1, -"
    assert shown("x", []) == "-"
