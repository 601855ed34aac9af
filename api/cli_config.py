"""`spec-serve config show`: every setting, its value and its origin.

Takes the flags of `serve`, so that a command line can be looked at before it is run. Loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings
from spec_serve.api.settings import SettingError, Value

HIDDEN = "(hidden)"  # instead of keys


def main(argv: Sequence[str]) -> int:
    """Print the settings as a table, or with --json as one object {key: {value, origin}}."""
    parser = Parser("spec-serve config", "Show each setting, its value and where it comes from.")
    parser.add_argument("action", choices=("show",))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser)
    given = parser.parse_args(argv)
    try:
        settings = read_settings(given)
    except SettingError as error:
        return fail(error)
    if given.json:
        held = {
            s.key: {"value": HIDDEN if s.secret and c.value else c.value, "origin": c.origin}
            for s, c in settings
        }
        print(json.dumps(held, indent=1))
        return 0
    rows = [
        (s.key, HIDDEN if s.secret and c.value else shown(c.value), c.origin) for s, c in settings
    ]
    key, value = (max(len(row[i]) for row in rows) for i in (0, 1))
    for row in rows:
        print(f"{row[0]:<{key}}  {row[1]:<{value}}  {row[2]}")
    return 0


def shown(value: Value) -> str:
    """A value as it would be written in the file; "-" for an empty one."""
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    return str(value) or "-"
