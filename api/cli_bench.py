"""`spec-serve bench NAME ...`: hands the rest of the line to a module of bench/.

The benches stand to the right of this folder on the import ladder, so they are found by name when
one is asked for; nothing here knows what they measure.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "spec_serve.bench"
USAGE = "usage: spec-serve bench NAME [...]   (spec-serve bench NAME --help says more)"


def main(argv: Sequence[str]) -> int:
    """Run one bench; returns its exit code."""
    found = benches()
    lines = [USAGE, "", "benches:", *(f"  {name:<11}{said}" for name, said in found.items())]
    if argv and argv[0] in ("-h", "--help"):
        print("\n".join(lines))
        return 0
    if not argv or argv[0] not in found:
        wrong = [f"spec-serve: error: there is no bench {argv[0]!r}", ""] if argv else []
        print("\n".join([*wrong, *lines]), file=sys.stderr)
        return 2
    module = importlib.import_module(f"{PACKAGE}.{argv[0]}")
    return int(module.main(list(argv[1:])))


def benches() -> dict[str, str]:
    """Names of the benches and the first line of what they say; imports none of them."""
    package = importlib.util.find_spec(PACKAGE)
    made: dict[str, str] = {}
    for folder in package.submodule_search_locations or () if package is not None else ():
        modules = {path.stem: path for path in Path(folder).glob("*.py")}
        modules |= {path.parent.name: path for path in Path(folder).glob("*/__init__.py")}
        for name, path in sorted(modules.items()):
            text = path.read_text(encoding="utf-8")
            if "\ndef main(" in text and name != "__init__":
                made[name] = text.removeprefix('"""').splitlines()[0].strip('".')
    return made
