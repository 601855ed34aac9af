"""Calls and imports that have opened other servers to the outside: none of them in the package.

Reads the source as syntax trees. What is allowed where is said in the tables below.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cache", "kernels", "target", "draft", "spec", "api", "bench")
MODULES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name
)

# Runs code, or builds objects, out of bytes that somebody sent.
CALLS = {"eval", "exec", "__import__"}
METHODS = {
    "recv_pyobj", "send_pyobj", "yaml.load", "numpy.load", "np.load", "os.system", "os.popen",
}  # fmt: skip
MODULES_NEVER = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle",
    "telnetlib", "ftplib", "xmlrpc",
}  # fmt: skip
# Fetches what a name says: only models by the command line, clients, and benchmarks of a server.
FETCHING = {"urllib.request", "requests", "httpx", "aiohttp", "http.client", "huggingface_hub"}
MAY_FETCH = re.compile(
    r"target/hub\w*\.py|api/client/.*|api/lang/openai\.py|api/cli\w*\.py|bench/.*"
)
UNSANDBOXED = {"jinja2.Environment", "Environment", "SandboxedEnvironment", "jinja2.Template"}
# Listening on every address.
ADDRESSES = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\])|^(0\.0\.0\.0|::)$")


def name_of(node: ast.AST) -> str:
    """a.b.c of an expression, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = name_of(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def dangers(source: str, name: str) -> list[str]:
    """What a module called `name` does that it must not, with lines."""
    tree = ast.parse(source)
    found = []
    for module, line in imports(tree):
        if module.partition(".")[0] in MODULES_NEVER:
            found.append(f"{line}: imports {module}")
        fetches = any(module == one or module.startswith(f"{one}.") for one in FETCHING)
        if fetches and not MAY_FETCH.fullmatch(name):
            found.append(f"{line}: {module} fetches")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            last = called.rpartition(".")[2]
            if called in CALLS or called in METHODS or last in METHODS:
                found.append(f"{node.lineno}: calls {called}")
            if called in UNSANDBOXED:
                found.append(f"{node.lineno}: {called} runs a model's template unbounded")
            if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords):
                found.append(f"{node.lineno}: a shell")
        text = node.value if isinstance(node, ast.Constant) else None
        # The server's own text names these addresses to tell them from loopback.
        if isinstance(text, str) and ADDRESSES.search(text) and name != "api/server.py":
            found.append(f"{getattr(node, 'lineno', 0)}: listens on every address: {text[:40]}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_does_nothing_dangerous(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert dangers(path.read_text(encoding="utf-8"), name) == []


@pytest.mark.parametrize(
    ("source", "many"),
    [
        ("import pickle", 1),
        ("from dill import loads", 1),
        ("socket.recv_pyobj()", 1),
        ("x = eval(text)", 1),
        ("import httpx", 1),
        ("from urllib.request import urlopen", 1),
        ("from urllib.parse import urlsplit", 0),
        ("import numpy as np\nnp.load(path)", 1),
        ("subprocess.run(words, shell=True)", 1),
        ("subprocess.run(words, shell=False)", 0),
        ("jinja2.Environment().from_string(template)", 1),
        ("socket.bind('tcp://*:5557')", 1),
        ("socket.bind('tcp://127.0.0.1:5557')", 0),
        ("model.eval()", 0),
    ],
)
def test_dangers_are_seen(source: str, many: int) -> None:
    assert len(dangers(source, "api/x.py")) == many
