"""The command line without a model: commands, help, settings shown, ports checked, log lines.

What needs an engine stands in the tests of each command.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spec_serve.api import cli, cli_engine, cli_serve, logs
from spec_serve.api.cli_flags import Parser, add_settings, read_settings
from spec_serve.api.engine_thread import EngineThread
from spec_serve.api.ports import taken
from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.settings import FURTHER, SETTINGS, settle


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("name", [*cli.COMMANDS])
def test_help_of_every_command_needs_no_torch(name: str) -> None:
    code = (
        "import sys\n"
        "from spec_serve.api.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'grpc', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, name, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "usage: spec-serve" in ran.stdout


def test_help_without_a_command_names_all_flags_and_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    further = [setting.flag for setting in SETTINGS if setting.group in FURTHER]
    flags = [setting.flag for setting in SETTINGS if setting.flag not in further]
    assert [flag for flag in flags if flag not in said] == []
    assert [flag for flag in further if flag in said.split()] == []
    assert [name for name in cli.COMMANDS if f"\n  {name} " not in said] == []


def test_help_all_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help-all"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert [setting.flag for setting in SETTINGS if setting.flag not in said] == []


def test_a_wrong_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sreve"]) == 2
    assert "no command 'sreve'; did you mean serve?" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error_to_print() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from spec_serve.api.cli import main; sys.exit(main(['config', 'show']))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--targ", "x"])
    assert end.value.code == 2


def test_serve_refuses_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_serve, "open_engine", lambda settings: pytest.fail("loaded"))
    monkeypatch.delenv("SPEC_SERVE_TARGET", raising=False)
    assert cli.main([]) == 2
    assert "target: say which model" in capsys.readouterr().err
    assert cli.main(["serve", "--target", "m", "--max-rows", "0"]) == 2
    assert "max-rows: must be a whole number of at least 1" in capsys.readouterr().err
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert cli.main(["--target", "m", "--port", str(port), "--grpc-port", "off"]) == 2
        assert f"port: {port} is in use" in capsys.readouterr().err
        assert cli.main(["--target", "m", "--grpc-port", str(port), "--port", "0"]) == 2
        assert f"grpc-port: {port} is in use" in capsys.readouterr().err


def test_ports_that_clash_or_are_free() -> None:
    same = {"port": 4000, "grpc-port": 4000}
    assert taken("127.0.0.1", same) == "grpc-port: must differ from port"
    assert taken("127.0.0.1", {"port": 0, "grpc-port": 0}) is None
    assert taken("127.0.0.1", {"port": 0, "grpc-port": None}) is None
    assert "host: 'no.such.host.invalid'" in str(taken("no.such.host.invalid", {"port": 4000}))


def test_serve_hands_the_engine_to_the_server_and_says_what_to_open(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    root_logger: logging.Logger,
) -> None:
    from spec_serve.api import server

    engine, tokenizer = object(), object()
    seen: list[object] = []

    def run_server(*parts: object) -> int:
        seen.extend(parts[:3])
        told = parts[3]
        assert isinstance(parts[4], EngineThread)
        assert callable(told)
        told(["ws://here/v1/stream", "http://here/health"])
        return 7

    monkeypatch.setattr(cli_serve, "open_engine", lambda settings: (engine, tokenizer))
    monkeypatch.setattr(server, "run_server", run_server)
    argv = ["--target", "m", "--port", "0", "--grpc-port", "off", "--quiet", "--drain-s", "2"]
    assert cli.main(argv) == 7
    assert seen[:2] == [engine, tokenizer]
    assert seen[2] == ServeSettings(port=0, grpc_port=None, drain_s=2.0)
    assert capsys.readouterr().out.splitlines() == [
        "spec-serve is ready", "  ws://here/v1/stream", "  http://here/health",
        "  http://here/v1   for OpenAI clients", "  http://here/   to chat in a browser",
    ]  # fmt: skip
    assert root_logger.level == logging.WARNING


def test_config_show_tells_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.toml"
    file.write_text('draft = "none"\nport = 1\n')
    monkeypatch.setenv("SPEC_SERVE_CONFIG", str(file))
    monkeypatch.setenv("SPEC_SERVE_PORT", "2")
    assert cli.main(["config", "show", "--json", "--max-rows", "3", "--quiet"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["draft"] == {"value": "none", "origin": f"file {file}"}
    assert held["port"] == {"value": 2, "origin": "variable SPEC_SERVE_PORT"}
    assert held["max-rows"] == {"value": 3, "origin": "flag --max-rows"}
    assert held["quiet"] == {"value": True, "origin": "flag --quiet"}
    assert held["host"] == {"value": "127.0.0.1", "origin": "default"}
    assert cli.main(["config", "show"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert len(lines) == len(SETTINGS)
    assert lines["port"] == ["2", "variable", "SPEC_SERVE_PORT"]
    file.write_text("prot = 1")
    assert cli.main(["config", "show"]) == 2
    assert "unknown key 'prot'" in capsys.readouterr().err


def test_repeated_flags_make_a_list() -> None:
    parser = Parser("x", "x")
    add_settings(parser)
    given = parser.parse_args(["--allow-origins", "a", "--allow-origins", "b"])
    assert read_settings(given, {})["allow-origins"] == ("a", "b")


def test_the_engine_gets_its_options_and_torch_its_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec_serve.spec import load
    from spec_serve.spec.assemble import EngineOptions

    seen: list[object] = []

    def build_engine(options: EngineOptions, told: cli_engine.Told) -> tuple[str, str]:
        told("target", 0.0)
        seen.append(options)
        return "engine", "tokenizer"

    monkeypatch.setattr(load, "build_engine", build_engine)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    settings = settle({"target": "m", "threads": "3", "max-rows": "5"}, {})
    assert cli_engine.open_engine(settings) == ("engine", "tokenizer")
    assert seen == [3, EngineOptions("m", max_rows=5)]
    assert capsys.readouterr().err == "spec-serve: loading the target\n"
    cli_engine.open_engine(settle({"target": "m", "quiet": "true"}, {}))
    assert seen[2:] == [EngineOptions("m")]
    assert capsys.readouterr().err == ""


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_engine.progress(quiet=False) as told:
        for what, share in (("target", 0.0), ("target", 0.5), ("target", 1.0), ("ready", 1.0)):
            told(what, share)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (out, len(lines)) == ("", 2)
    assert lines[0] == "spec-serve: loading the target"
    assert lines[1].startswith("spec-serve: loaded in ")
    with cli_engine.progress(quiet=True) as told:
        told("target", 0.0)
    assert capsys.readouterr() == ("", "")


def test_progress_is_drawn_on_a_terminal_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="broken"), cli_engine.progress(quiet=False) as told:
        told("target", 0.5)
        raise ValueError("broken")
    shown, last = "\x1b[?25l", "\x1b[?25h"  # the cursor is hidden while bars are drawn
    assert terminal.getvalue().count(shown) == terminal.getvalue().count(last) == 1
    assert "loading the target" in terminal.getvalue()
    with cli_engine.progress(quiet=False) as told:
        told("target", 0.0)
        told("target", 1.0)
        told("measuring", 0.0)
        told("ready", 1.0)
    assert terminal.getvalue().count(last) == 2
    assert "\x1b[2Kspec-serve: loaded in " in terminal.getvalue().splitlines()[-1]


def test_log_lines_are_json_or_text(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    logs.set_up("json", stream=stream)
    root_logger.info("two\nlines", extra={"request": "r1"})
    held = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert (held["message"], held["request"], held["level"]) == ("two\nlines", "r1", "info")
    logs.set_up("text", quiet=True, stream=stream)
    root_logger.info("hidden")
    root_logger.warning("shown")
    assert "hidden" not in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("shown")
