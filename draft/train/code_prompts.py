"""Prompts about code, made from signatures and first paragraphs of Python's own library.

What is asked follows from a name's checksum, so the same library gives the same prompts. Only
modules that are harmless to import are read; nothing of them is run.
"""

from __future__ import annotations

import importlib
import inspect
import zlib
from collections.abc import Iterator

MODULES = (
    "argparse", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections",
    "configparser", "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "fnmatch",
    "fractions", "functools", "glob", "hashlib", "heapq", "hmac", "html", "inspect", "ipaddress",
    "itertools", "json", "keyword", "linecache", "locale", "logging", "math", "operator",
    "os.path", "pathlib", "pprint", "queue", "random", "re", "sched", "secrets", "shlex", "shutil",
    "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading",
    "tokenize", "types", "urllib.parse", "uuid", "weakref", "zlib",
)  # fmt: skip
LONGEST_SIGNATURE = 120
LONGEST_TEXT = 300

_ASKED = (
    "Write a Python function `{name}{signature}` that does the following: {said}",
    'Complete this Python function:\n\ndef {name}{signature}:\n    """{said}"""\n',
    "Explain what `{module}.{name}` in Python does and give an example. Its documentation says:"
    " {said}",
    "Write a short Python program that uses `{module}.{name}{signature}`. {said}",
)


def code_prompts(modules: tuple[str, ...] = MODULES) -> Iterator[tuple[str, str]]:
    """(source, prompt) of every documented public callable of `modules`."""
    for module in modules:
        for name, signature, said in _callables(module):
            asked = _ASKED[zlib.crc32(f"{module}.{name}".encode()) % len(_ASKED)]
            yield (
                f"stdlib/{module}",
                asked.format(module=module, name=name, signature=signature, said=said),
            )


def _callables(module: str) -> Iterator[tuple[str, str, str]]:
    """(name, signature, first paragraph) of what a module itself defines."""
    opened = importlib.import_module(module)
    own = {module, opened.__name__, "_" + module}
    for name, held in sorted(vars(opened).items()):
        if name.startswith("_") or not callable(held) or getattr(held, "__module__", "") not in own:
            continue
        said = inspect.getdoc(held)
        try:
            signature = str(inspect.signature(held))
        except (ValueError, TypeError):
            continue
        if said and len(signature) <= LONGEST_SIGNATURE:
            first = " ".join(said.split("\n\n")[0].split())
            yield name, signature, first[:LONGEST_TEXT]
