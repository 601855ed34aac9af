"""`spec-serve keys`: make API keys.

A key is shown once; the server's file of keys needs its hash alone. Knows the form of that file
(api/auth.py) and touches none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from spec_serve.api.auth import fresh_key, hashed
from spec_serve.api.cli_flags import Parser, fail


def parser() -> Parser:
    """The arguments of `keys`."""
    made = Parser("spec-serve keys", "Make API keys for --api-key-file or --admin-key.")
    actions = made.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        prog="spec-serve keys new",
        description="Make a key: to standard output its line for the file of keys, to standard "
        "error the key itself, which nobody can find out later.",
        help="make a key and its line for the file of keys",
    )
    new.add_argument("name", metavar="NAME", help="whose key it is, for logs and limits")
    return made


def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    given = parser().parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9_.@-]{1,64}", given.name):
        return fail("NAME: must be 1 to 64 letters, digits or _.@-")
    key = fresh_key()
    print(f"{given.name}:{hashed(key)}", flush=True)
    print(f"key: {key}", file=sys.stderr, flush=True)
    return 0
