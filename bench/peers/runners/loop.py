"""Asks one runner what comes in on stdin and writes its answers to stdout, a JSON object a line.

Run as `python -P loop.py RUNNER`. A runner is a script with `load(options) -> (ask, about)`; `ask`
takes {"ids", "mode", "max_tokens"} and gives {"ids", "first_s", "total_s"}. What a library prints
goes to stderr. Knows no engine, and needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

Ask = Callable[[dict[str, Any]], dict[str, Any]]


def main(runner: str) -> None:
    """Answer until stdin ends. The first line is {"load": options}, and answered by {"ready"}."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    load = runpy.run_path(runner)["load"]
    ask: Ask | None = None
    for line in sys.stdin:
        question = json.loads(line)
        reply: dict[str, Any]
        try:
            if "load" in question:
                ask, about = load(question["load"])
                reply = {"ready": about}
            else:
                assert ask is not None, "asked before it was loaded"
                reply = ask(question)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
