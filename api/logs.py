"""Log lines of a process that serves: text for people, or one JSON object a line for machines.

Sets up the root logger once, at the start of a command. Prompts and texts are never logged here;
what a record says is its writer's business.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"} and whatever a record carries as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, newlines escaped."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        held: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        held.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            held["error"] = self.formatException(record.exc_info)
        return json.dumps(held, ensure_ascii=False, default=str)


def set_up(form: str, quiet: bool = False, stream: TextIO | None = None) -> None:
    """Log to `stream` (None = standard error) as "text" or "json"; warnings only with `quiet`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    if form == "json":
        handler.setFormatter(JsonLines())
    else:
        line = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING if quiet else logging.INFO)
