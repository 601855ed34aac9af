"""Completion scripts: bash's is run as a shell would, the others are read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spec_serve.api import cli
from spec_serve.api.cli_completion import bash, commands, fish, zsh
from spec_serve.api.settings import SETTINGS


def complete(tmp_path: Path, *words: str) -> set[str]:
    script = bash(commands()) + f"""
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
_spec_serve; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return {line for line in done.stdout.splitlines() if line}


def test_bash_completes_commands_flags_and_values(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert complete(tmp_path, "spec-serve", "ge") == {"generate"}
    assert complete(tmp_path, "spec-serve", "") >= set(cli.COMMANDS)
    assert complete(tmp_path, "spec-serve", "--max-q") == {"--max-queue", "--max-queue-tokens"}
    assert complete(tmp_path, "spec-serve", "serve", "--ws-impl", "") == {"picows", "websockets"}
    assert complete(tmp_path, "spec-serve", "--target", "smol") == {"smollm2-135m-instruct"}
    assert complete(tmp_path, "spec-serve", "generate", "--target", "mod") == {"model.gguf"}
    assert complete(tmp_path, "spec-serve", "models", "pu") == {"pull"}
    assert "latency" in complete(tmp_path, "spec-serve", "bench", "")
    assert complete(tmp_path, "spec-serve", "--config", "mo") == {"model.gguf"}


@pytest.mark.parametrize("made", [bash, zsh, fish])
def test_every_flag_of_serving_is_there(made: object) -> None:
    assert callable(made)
    script = made(commands())
    for setting in SETTINGS:
        flag = setting.flag if made is not fish else f"-l {setting.key}"
        assert flag in script


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef spec-serve\n")
