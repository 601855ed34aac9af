"""`spec-serve completion SHELL`: what bash, zsh or fish need to complete commands and flags.

Made from the parsers themselves, so that a new flag is completed without a word here. Short names
of models complete what --target and --draft take; everything else without choices is a file.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_serve.api import cli
from spec_serve.api.cli_flags import Parser

SHELLS = ("bash", "zsh", "fish")
HELP = """examples:
  spec-serve completion bash > ~/.local/share/bash-completion/completions/spec-serve
  spec-serve completion zsh > "${fpath[1]}/_spec-serve"
  spec-serve completion fish > ~/.config/fish/completions/spec-serve.fish"""


@dataclass(slots=True)
class Command:
    """What may follow a command. flags: name -> choices of its value; None = takes no value."""

    help: str
    words: list[str] = field(default_factory=list)
    flags: dict[str, list[str] | None] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Print the script of one shell; returns the exit code."""
    parser = Parser("spec-serve completion", "Print a shell's completion script.", HELP)
    parser.add_argument("shell", choices=SHELLS, metavar="{bash,zsh,fish}")
    shell = parser.parse_args(argv).shell
    made = {"bash": bash, "zsh": zsh, "fish": fish}[shell]
    print(made(commands()))
    return 0


def commands() -> dict[str, Command]:
    """All commands and what their parsers take."""
    from spec_serve.target.hub import short_names

    made = {}
    for name, (module_name, said) in cli.COMMANDS.items():
        module = importlib.import_module(f"spec_serve.api.{module_name}")
        command = made[name] = Command(said)
        if hasattr(module, "parser"):
            command.flags = flags(module.parser())
        for flag in ("--target", "--draft"):
            if flag in command.flags:
                command.flags[flag] = sorted(short_names())
        if name == "models":
            command.words = list(module.ACTIONS)
        elif name == "bench":
            command.words = list(module.benches())
        elif name == "completion":
            command.words = list(SHELLS)
        command.flags.setdefault("--help", None)
    return made


def flags(parser: argparse.ArgumentParser) -> dict[str, list[str] | None]:
    """The long flags of a parser and what their values may be; [] = anything."""
    made: dict[str, list[str] | None] = {}
    for action in parser._actions:
        for flag in action.option_strings:
            if not flag.startswith("--"):
                continue
            if action.nargs == 0:
                made[flag] = None
                continue
            shown = action.metavar if isinstance(action.metavar, str) else ""
            choices = [str(one) for one in action.choices or ()]
            if shown.startswith("{"):
                choices = shown.strip("{}").split(",")
            made[flag] = choices
    return made


def bash(found: dict[str, Command]) -> str:
    """A script for bash 4 or newer."""
    lines = [
        "_spec_serve() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" cmd=serve',
        f'  case "${{COMP_WORDS[1]}}" in {"|".join(found)}) cmd="${{COMP_WORDS[1]}}";; esac',
        '  local flags="" words=""',
        '  case "$cmd" in',
    ]
    for name, command in found.items():
        names, words = " ".join(command.flags), " ".join(command.words)
        lines.append(f'    {name}) flags="{names}" words="{words}"')
        lines.append('      case "$prev" in')
        for flag, choices in command.flags.items():
            if choices:
                reply = f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$cur"))'
                files = '; COMPREPLY+=($(compgen -f -- "$cur"))' if flag in _FILES else ""
                lines.append(f"        {flag}) {reply}{files}; return;;")
            elif choices is not None:
                lines.append(f'        {flag}) COMPREPLY=($(compgen -f -- "$cur")); return;;')
        lines.append("      esac;;")
    lines += [
        "  esac",
        f'  [ "$COMP_CWORD" = 1 ] && words="{" ".join(found)}"',
        '  COMPREPLY=($(compgen -W "$flags $words" -- "$cur"))',
        "}",
        "complete -o filenames -F _spec_serve spec-serve",
    ]
    return "\n".join(lines)


def zsh(found: dict[str, Command]) -> str:
    """zsh runs bash's completions by its own bashcompinit."""
    start = "#compdef spec-serve\nautoload -U +X bashcompinit && bashcompinit\n"
    return start + bash(found)


def fish(found: dict[str, Command]) -> str:
    """A script for fish."""
    names = " ".join(found)
    lines = []
    for name, command in found.items():
        said = command.help.replace("'", "\\'")
        lines.append(
            f"complete -c spec-serve -f -n 'not __fish_seen_subcommand_from {names}' "
            f"-a {name} -d '{said}'"
        )
        here = f"__fish_seen_subcommand_from {name}"
        if name == "serve":
            others = " ".join(one for one in found if one != "serve")
            here = f"not __fish_seen_subcommand_from {others}"
        if command.words:
            words = " ".join(command.words)
            lines.append(f"complete -c spec-serve -f -n '{here}' -a '{words}'")
        for flag, choices in command.flags.items():
            line = f"complete -c spec-serve -n '{here}' -l {flag[2:]}"
            if choices:
                line += f" {'-r' if flag in _FILES else '-x'} -a '{' '.join(choices)}'"
            elif choices is not None:
                line += " -r"
            lines.append(line)
    return "\n".join(lines)


_FILES = ("--target", "--draft")  # short names, but files too
