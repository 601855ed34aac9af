"""`spec-serve models list | pull | rm | convert | info`: the models on this machine.

Standard output holds results, progress goes to standard error. How models are found, fetched and
described is known in target/; this module only asks and prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spec_serve.api.cli_flags import Parser, fail, say

ACTIONS = {
    "list": "models here, and short names that can be pulled",
    "pull": "fetch a model: short name or hub id",
    "rm": "remove a fetched model",
    "convert": "turn a folder of .bin or .pt weights into safetensors, running none of its code",
    "info": "describe a model without reading its weights",
}


def main(argv: Sequence[str]) -> int:
    """Do one of the actions; returns the exit code."""
    lines = "\n".join(f"  {name:<10}{said}" for name, said in ACTIONS.items())
    parser = Parser(
        "spec-serve models",
        "Models on this machine.",
        f"actions (spec-serve models ACTION --help says more):\n{lines}",
    )
    parser.add_argument("action", choices=tuple(ACTIONS), metavar="ACTION")
    if not argv or argv[0] not in ACTIONS:
        parser.parse_args(argv)
    action, rest = argv[0], argv[1:]
    run: dict[str, Callable[[Parser, Sequence[str]], None]] = {
        "list": _list,
        "pull": _pull,
        "rm": _remove,
        "convert": _convert,
        "info": _info,
    }
    own = Parser(f"spec-serve models {action}", f"{ACTIONS[action].capitalize()}.")
    try:
        run[action](own, rest)
    except (ValueError, OSError) as error:  # ModelNotFound, CheckpointError, ...
        return fail(error, 1)
    return 0


def _list(parser: Parser, argv: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    from spec_serve.target.hub import list_local, short_names

    here = [(model.name, model.size, str(model.path)) for model in list_local()]
    names = {name for name, _, _ in here}
    rest = [(entry.name, entry.size) for entry in short_names().values() if entry.name not in names]
    if given.json:
        local = [{"name": name, "bytes": size, "path": path} for name, size, path in here]
        more = [{"name": name, "bytes": size} for name, size in rest]
        print(json.dumps({"local": local, "available": more}, indent=1))
        return
    missing = "not here; `spec-serve models pull` fetches it"
    rows = [*here, *((name, size, missing) for name, size in rest)]
    _table([(name, size_text(size), where) for name, size, where in rows])


def _pull(parser: Parser, argv: Sequence[str]) -> None:
    parser.add_argument("name", nargs="+", metavar="NAME")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    given = parser.parse_args(argv)
    from spec_serve.target.hub import pull

    for name in given.name:
        print(pull(name, progress=not given.quiet), flush=True)


def _remove(parser: Parser, argv: Sequence[str]) -> None:
    parser.add_argument("name", nargs="+", metavar="NAME")
    given = parser.parse_args(argv)
    from spec_serve.target.hub import remove

    for name in given.name:
        say(f"removed {name}, {size_text(remove(name))} freed")


def _convert(parser: Parser, argv: Sequence[str]) -> None:
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is made")
    given = parser.parse_args(argv)
    from spec_serve.target.convert import convert_to_safetensors

    convert_to_safetensors(given.source, given.out, lambda name: say(f"converting {name}"))
    print(given.out)


def _info(parser: Parser, argv: Sequence[str]) -> None:
    parser.add_argument("name", metavar="MODEL", help="path, short name or hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    from spec_serve.target.describe import describe
    from spec_serve.target.hub import resolve

    held = describe(resolve(given.name))
    if given.json:
        print(json.dumps(held, indent=1, default=str))
    else:
        _table([(name.replace("_", " "), shown(name, value)) for name, value in held.items()])


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns side by side; the last one as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def shown(name: str, value: Any) -> str:
    """A described value for people: sizes in units, lists and counts in a line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name in ("file_size", "bytes", "size"):
        return size_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown('', inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(shown("", inner) for inner in value) or "-"
    return str(value)


def size_text(size: int) -> str:
    """Bytes in the largest binary unit that leaves at least one: 1536 -> 1.5 KiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"
        value /= 1024
    return f"{value:.1f} GiB"
