"""Flags made from the table of settings, shared by the commands that start an engine.

Knows argparse and the process's environment, which it hands to `settle`. What a setting means is
known in settings.py; loading anything is other modules' business.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from spec_serve.api.settings import EVERYDAY, FURTHER, SETTINGS, Setting, Settings, settle

ALL_GROUPS = (*EVERYDAY, *FURTHER)
USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """Wide help without wrapping mid-sentence, and no abbreviated flags: they break scripts."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog or None,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=30, width=100
            ),
        )
        self.further: list[tuple[argparse.Action, str]] = []  # shown by --help-all alone


class HelpAll(argparse.Action):
    """--help-all: the help with the groups that --help leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        assert isinstance(parser, Parser)
        for action, said in parser.further:
            action.help = said
        parser.print_help()
        parser.exit()


def add_settings(parser: Parser, groups: Iterable[str] = ALL_GROUPS) -> None:
    """Add the flags of these groups, and --config; those of FURTHER groups are shown on demand."""
    groups = tuple(groups)
    for group in groups:
        section = parser.add_argument_group(group)
        for setting in SETTINGS:
            if setting.group != group:
                continue
            action = _add(section, setting)
            if group in FURTHER:
                parser.further.append((action, action.help or ""))
                action.help = argparse.SUPPRESS
    if parser.further:
        parser.add_argument(
            "--help-all", nargs=0, action=HelpAll, default=argparse.SUPPRESS,
            help="also show the flags for " + ", ".join(g for g in groups if g in FURTHER),
        )  # fmt: skip
    parser.add_argument_group("configuration").add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of settings, named like the flags; each also has a variable such as "
        "SPEC_SERVE_MAX_ROWS. A flag wins over a variable, that over the file",
    )


def _add(section: argparse._ArgumentGroup, setting: Setting) -> argparse.Action:
    said = setting.help.replace("%", "%%")
    if setting.kind == "switch":
        return section.add_argument(
            setting.flag, dest=setting.field, action="store_const", const="true",
            default=argparse.SUPPRESS, help=said,
        )  # fmt: skip
    if setting.default not in ("", ()):
        said += f" (default: {setting.default})"
    return section.add_argument(
        setting.flag,
        dest=setting.field,
        default=argparse.SUPPRESS,
        action="append" if setting.kind == "list" else "store",
        metavar="{" + ",".join(setting.choices) + "}" if setting.choices else setting.metavar,
        help=said,
    )


def read_settings(given: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of a parsed command line. Notes go to standard error; SettingError if bad."""
    environ = os.environ if environ is None else environ
    flags = {s.key: getattr(given, s.field) for s in SETTINGS if hasattr(given, s.field)}
    file = given.config or environ.get("SPEC_SERVE_CONFIG") or None
    settings = settle(flags, environ, Path(file) if file else None)
    for note in settings.notes:
        say(f"note: {note}")
    return settings


def say(text: str) -> None:
    """A line for people: standard error, so that standard output stays the result's."""
    print(f"spec-serve: {text}", file=sys.stderr, flush=True)


def fail(error: object, code: int = USAGE_ERROR) -> int:
    """Say what is wrong; returns the exit code."""
    say(f"error: {error}")
    return code
