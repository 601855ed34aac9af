"""`spec-serve doctor`: the findings of doctor.py for people, or as JSON.

Takes the server's flags for address and ports. Ends with 1 if serving is impossible here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings
from spec_serve.api.doctor import examine
from spec_serve.api.settings import SERVER, SettingError
from spec_serve.api.version import __version__


def main(argv: Sequence[str]) -> int:
    """Print a report; returns 0 if everything needed works, else 1."""
    parser = Parser(
        "spec-serve doctor", "Say what works on this machine, and why what doesn't doesn't."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, (SERVER,))
    given = parser.parse_args(argv)
    try:
        settings = read_settings(given)
    except SettingError as error:
        return fail(error)
    found = []
    area = ""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    if not given.json:
        print(f"spec-serve {__version__}")
    for finding in examine(settings["host"], settings["port"], settings["grpc-port"]):
        found.append(finding)
        if given.json:
            continue
        if finding.area != area:
            area = finding.area
            print(f"\n{bold}{area}{plain}")
        mark = "ok" if finding.works else "NO" if finding.needed else "--"
        print(f"  {mark}  {finding.name:<18} {finding.said}", flush=True)
    missing = [f.name for f in found if f.needed and not f.works]
    if given.json:
        held = {"ok": not missing, "findings": [dataclasses.asdict(f) for f in found]}
        print(json.dumps(held, indent=1))
    elif missing:
        print(f"\nserving is impossible without: {', '.join(missing)}")
    return 1 if missing else 0
