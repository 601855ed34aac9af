"""`spec-serve generate` with flags for what the text has to look like; a tiny real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spec_serve.api import cli, cli_generate
from tests.grammars import constrained, spelling

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}  # fmt: skip
TWICE = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3,
         "uniqueItems": True}  # fmt: skip


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_generate, "open_engine", lambda _: (constrained("self"), spelling()))


def ran(*argv: str) -> int:
    return cli.main(["generate", "--target", "tiny", "--prompt", "the other", *argv])


def made(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert ran("--json", *argv) == 0
    held: dict[str, Any] = json.loads(capsys.readouterr().out)
    return held


def test_each_flag_shapes_the_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema, lark = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA))
    lark.write_text('start: "<" (start | "x") ">"')
    for flags, fits in (
        (["--regex", "[0-9]{3}-[0-9]{2}"], re.compile("[0-9]{3}-[0-9]{2}").fullmatch),
        (["--json-schema", str(schema)], lambda text: set(json.loads(text)) == {"ok"}),
        (["--choices", "yes", "no"], ("yes", "no").__contains__),
        (["--grammar", "date"], re.compile(r"\d{4}-\d\d-\d\d").fullmatch),
        (["--lark", str(lark)], re.compile("<+x>+").fullmatch),
    ):
        found = made(capsys, *flags)
        assert fits(found["text"]), found
        assert found["finish_reason"] == "stop" and found["constraint"]["complete"]
        assert found["constraint"]["schema_valid"] is (True if "schema" in flags[0] else None)
    assert "constraint" not in made(capsys, "--max-tokens", "3")
    assert made(capsys, "--json-object", "--max-tokens", "9")["text"].startswith("{")


def test_what_was_not_enforced_or_cut_short_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = tmp_path / "s.json"
    schema.write_text(json.dumps(TWICE))
    flags = ["--json-schema", str(schema)]
    assert ran(*flags) == 1
    assert "constraint: " in (said := capsys.readouterr().err) and "uniqueItems" in said
    assert ran(*flags, "--lenient") == 0
    assert "not enforced: uniqueItems" in capsys.readouterr().err
    found = made(capsys, *flags, "--lenient")["constraint"]
    assert (found["ignored"], found["schema_valid"]) == (["uniqueItems"], False)
    assert ran(*flags, "--lenient", "--max-tokens", "2") == 0
    assert "cut short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--regex", "("], 1, "constraint: "),
        (["--grammar", "klingon"], 1, "klingon"),
        (["--json-schema", "missing.json"], 2, "json-schema: missing.json"),
        (["--lenient", "--regex", "a"], 2, "lenient: "),
        (["--json-object", "--ignore-eos"], 1, "ignore_eos: "),
    ],
)
def test_what_can_not_be_enforced_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    assert ran(*argv) == code
    out, err = capsys.readouterr()
    assert not out and said in err


def test_one_of_the_flags_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ran("--regex", "a", "--choices", "a", "b")
    assert "not allowed with" in capsys.readouterr().err
