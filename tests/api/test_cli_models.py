"""`spec-serve models`: what is listed, fetched, removed, converted and described.

Uses a model cache of its own and fetches nothing; how models are fetched is tested in tests/target.
One model is converted, described and run as a user would.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_serve.api import cli
from spec_serve.api.cli_models import shown, size_text
from spec_serve.target import hub
from tests.tiny import write_tiny_model_dir

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


def test_a_converted_model_is_described_and_answers_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, bins, out = write_tiny_model_dir(tmp_path / "m"), tmp_path / "bins", tmp_path / "out"
    shutil.copytree(made, bins)
    torch.save(load_file(made / "model.safetensors"), bins / "pytorch_model.bin")
    (bins / "model.safetensors").unlink()
    assert cli.main(["models", "info", str(bins)]) == 1
    assert "models convert" in capsys.readouterr().err
    assert cli.main(["models", "convert", str(bins), str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert "converting pytorch_model.bin" in captured.err
    answers, described = [], []
    for folder in (made, out):
        assert cli.main(["models", "info", str(folder), "--json"]) == 0
        described.append(json.loads(capsys.readouterr().out))
        argv = ["--prompt", "the other", "--max-tokens", "8", "--ignore-eos", "--json", "--quiet"]
        assert cli.main(["generate", "--target", str(folder), "--device", "cpu", *argv]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    same = ("parameters", "layers", "architecture", "quantisation", "vocabulary")
    assert [described[0][name] for name in same] == [described[1][name] for name in same]
    assert described[0]["parameters"] == sum(
        tensor.numel() for tensor in load_file(made / "model.safetensors").values()
    )
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]
    assert cli.main(["models", "info", str(made)]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["layers"], lines["context"]) == ("3", "1,024")


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
