"""The command line: `spec-serve` serves; a first word picks another command.

Knows which module holds which command and imports none before it is asked for, so that help comes
at once and without torch. A command is a module with `main(argv) -> exit code`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("cli_serve", "serve a model over WebSocket and gRPC (what no command means)"),
    "generate": ("cli_generate", "answer one prompt without a server"),
    "chat": ("cli_chat", "talk to a model in the terminal"),
    "models": ("cli_models", "list, fetch, remove, convert and describe models"),
    "bench": ("cli_bench", "measure latency, load on a server, prefix cache, kernels or host time"),
    "train": ("cli_train", "train a drafting head for a model"),
    "doctor": ("cli_doctor", "what works on this machine, and why what doesn't doesn't"),
    "keys": ("cli_keys", "make API keys"),
    "config": ("cli_config", "show every setting, its value and where it comes from"),
    "completion": ("cli_completion", "print a completion script for bash, zsh or fish"),
}
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = "serve"
    if words and not words[0].startswith("-"):
        name = words.pop(0)
    if name == "help":
        name, words = "serve", ["--help"]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(COMMANDS)}"
        print(f"spec-serve: error: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"spec_serve.api.{COMMANDS[name][0]}")
    try:
        code = int(module.main(words))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        # Python flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def command_list() -> str:
    """The commands as lines of help."""
    lines = [f"  {name:<12}{said}" for name, (_, said) in COMMANDS.items()]
    return "\n".join(["commands (spec-serve COMMAND --help says more):", *lines])


if __name__ == "__main__":
    sys.exit(main())
