"""Settings: precedence, origins, and refusals that name the key and where it was given.

Runs no server and loads no model; only the table and its readers.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.settings import (
    BY_KEY,
    EVERYDAY,
    FURTHER,
    SETTINGS,
    SettingError,
    parse,
    settle,
)
from spec_serve.spec.assemble import EngineOptions


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return path


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'port = 1\nmax-rows = 2\nhost = "::1"\n')
    environ = {"SPEC_SERVE_PORT": "11", "SPEC_SERVE_MAX_ROWS": "12"}
    settings = settle({"port": "21"}, environ, file)
    got = {key: (settings[key], settings.origin(key)) for key in ("port", "max-rows", "host")}
    assert got == {
        "port": (21, "flag --port"),
        "max-rows": (12, "variable SPEC_SERVE_MAX_ROWS"),
        "host": ("::1", f"file {file}"),
    }
    assert (settings["device"], settings.origin("device")) == ("auto", "default")


def test_defaults_are_those_of_the_engine_and_the_server() -> None:
    settings = settle({"target": "m"}, {})
    assert EngineOptions(**settings.engine_fields()) == EngineOptions("m")
    assert settings.serve_settings() == ServeSettings()


def test_every_option_of_the_engine_is_a_setting() -> None:
    fields = {field.name for field in dataclasses.fields(EngineOptions)}
    assert set(settle({"target": "m"}, {}).engine_fields()) == fields


def test_help_shows_at_most_25_flags_and_help_all_every_one() -> None:
    shown = [setting for setting in SETTINGS if setting.group in EVERYDAY]
    assert len(shown) + len(("--config", "--help", "--help-all", "--version")) <= 25
    assert {setting.group for setting in SETTINGS} == {*EVERYDAY, *FURTHER}


def test_all_values_reach_the_server() -> None:
    flags = {
        "host": "0.0.0.0", "port": "0", "grpc-port": "off", "model-name": "n",
        "allow-origins": ["https://a", "https://b"], "drain-s": "1.5",
    }  # fmt: skip
    assert settle(flags, {}).serve_settings() == ServeSettings(
        host="0.0.0.0",
        port=0,
        grpc_port=None,
        model_name="n",
        allow_origins=("https://a", "https://b"),
        drain_s=1.5,
    )


def test_file_holds_typed_values(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'target = "m"\nquiet = true\nkv-fraction = 0.5\ngrpc-port = "off"\n'
        'allow-origins = ["https://a"]\ndrain-s = 3\n',
    )
    settings = settle({}, {}, file)
    keys = ("target", "quiet", "kv-fraction", "grpc-port", "allow-origins", "drain-s")
    assert [settings[k] for k in keys] == ["m", True, 0.5, None, ("https://a",), 3.0]


def test_variables_hold_lists_and_switches() -> None:
    environ = {"SPEC_SERVE_ALLOW_ORIGINS": "https://a, https://b", "SPEC_SERVE_QUIET": "1"}
    settings = settle({}, environ)
    assert settings["allow-origins"] == ("https://a", "https://b")
    assert settings["quiet"] is True


def test_a_service_described_by_kubernetes_is_no_port() -> None:
    settings = settle({}, {"SPEC_SERVE_PORT": "tcp://10.0.0.1:8000"})
    assert (settings["port"], settings.origin("port")) == (8000, "default")
    assert "SPEC_SERVE_PORT" in settings.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port?"),
        ("max_rows = 1", "unknown key 'max_rows'; did you mean max-rows?"),
        ("zzz = 1", "unknown key 'zzz'"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("port = ", "is not TOML"),
        ("port = 70000", "port: must be a port from 0 to 65535, got 70000"),
        ("port = true", "port: must be"),
        ("port = 1.5", "port: must be"),
        ('quiet = "maybe"', "quiet: must be true or false"),
        ('dtype = "int4"', "dtype: must be one of auto, float32"),
        ("target = 3", "target: must be text"),
        ("kv-fraction = nan", "kv-fraction: must be a number from"),
        ("max-rows = 0", "max-rows: must be a whole number of at least 1, got 0"),
        ("allow-origins = [1]", "allow-origins: must be a list of texts"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingError, match=re.escape(said)) as raised:
        settle({}, {}, file)
    assert str(file) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"config: .*gone\.toml: No such file"):
        settle({}, {}, tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"port": "x"}, {}, "port: must be a port from 0 to 65535, got 'x' (flag --port)"),
        ({"port": "off"}, {}, "port: must be a port"),
        ({"port": "9" * 30}, {}, "port: must be a port"),
        ({}, {"SPEC_SERVE_MAX_ROWS": "1e3"}, "(variable SPEC_SERVE_MAX_ROWS)"),
        ({"drain-s": "inf"}, {}, "drain-s: must be a number from 0 to 86400"),
    ],
)
def test_what_is_wrong_elsewhere_is_named(
    flags: dict[str, str], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingError, match=re.escape(said)):
        settle(flags, environ)


def test_a_target_is_needed() -> None:
    with pytest.raises(SettingError, match=r"target: say which model"):
        settle({}, {}).engine_fields()


def test_names_follow_from_the_key() -> None:
    setting = BY_KEY["max-rows"]
    names = (setting.flag, setting.variable, setting.field)
    assert names == ("--max-rows", "SPEC_SERVE_MAX_ROWS", "max_rows")
    assert parse(setting, "7", "x") == 7
