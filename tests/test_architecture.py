"""The rules of the house, checked on the source: who imports whom, sizes, names, packaging.

Knows the layout of the repository and reads modules as syntax trees; it runs none of them, apart
from importing the light ones in a process of their own. Lint and types are in `test_lint.py`.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LADDER = ("cache", "kernels", "target", "draft", "spec", "api", "bench")
# Packages whose place below `spec_serve` is not their place on disk.
MOVED = {"api/client": "client", "api/lang": "lang"}
# What a client may use of the server's side.
CLIENT_MAY = (
    "spec_serve.api.messages", "spec_serve.api.program_wire", "spec_serve.api.proto",
    "spec_serve.client",
)  # fmt: skip
MODULE_LINES = 450
FUNCTION_LINES = 80


def generated(path: Path) -> bool:
    return "_pb2" in path.name


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = sorted(
    path for folder in LADDER for path in (ROOT / folder).rglob("*.py") if not generated(path)
)
# Held to the rules of form, yet no part of the installed package.
BESIDE = sorted(
    path for folder in ("tests", ".ci") for path in (ROOT / folder).rglob("*.py")
)
LIGHT = sorted(
    path
    for pattern in ("messages.py", "parts.py", "client/*.py", "version.py", "lang/**/*.py")
    for path in (ROOT / "api").glob(pattern)
)


def dotted(path: Path) -> str:
    """api/lang/__init__.py -> spec_serve.api.lang; api/client/tls.py -> spec_serve.client.tls"""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    for place, other in MOVED.items():
        if name.startswith(f"{place}/"):
            name = other + name.removeprefix(place)
    parts = name.split("/")
    return ".".join(("spec_serve", *(part for part in parts if part != "__init__")))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


Trees = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Iterator[Trees]:
    """Every module read once, for all rules; let go afterwards."""
    made = {path: parsed(path) for path in MODULES + BESIDE}
    yield made
    made.clear()


def broken(paths: list[Path], rule: Callable[[Path], list[str]]) -> str:
    """What `rule` finds wrong in each of the files, a line each: "" where all hold to it."""
    assert len(paths) > 10, "the files were not found"
    return "\n".join(f"{relative(path)}: {wrong}" for path in paths for wrong in rule(path))


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Absolute names of all modules imported anywhere below `tree`, with their lines.

    `from a import b` counts as a.b too: b may be a module. `package` resolves relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(filter(None, (*above, base)))
            yield base, node.lineno
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def package_of(path: Path) -> str:
    return dotted(path if path.name == "__init__.py" else path.parent / "__init__.py")


def climbs(tree: ast.AST, folder: str, package: str) -> list[str]:
    """Imports that reach to the right of `folder` on the ladder, or to bare folder names."""
    allowed = LADDER[: LADDER.index(folder) + 1]
    if "api" in allowed:
        allowed += tuple(MOVED.values())
    wrong = []
    for name, line in imported(tree, package):
        parts = name.split(".")
        if parts[0] == "spec_serve" and len(parts) > 1 and parts[1] not in allowed:
            wrong.append(f"line {line}: {folder} imports {name}")
        # `tests` is not installed; a bare `cache` is somebody else's.
        if parts[0] in (*LADDER, "tests"):
            wrong.append(f"line {line}: {name} is not below spec_serve")
    return wrong


def test_a_client_uses_little_of_the_server() -> None:
    wrong = []
    for path in sorted((ROOT / "api/client").glob("*.py")):
        for name, line in imported(parsed(path), package_of(path)):
            known = any(f"{name}.".startswith(f"{may}.") for may in CLIENT_MAY)
            if name.startswith("spec_serve.") and not known and name != "spec_serve.api":
                wrong.append(f"{relative(path)}:{line}: {name}")
    assert wrong == []


def chain(node: ast.AST) -> str:
    """The dotted name of an expression such as torch.load; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def may_read_environment(name: str) -> bool:
    return bool(re.fullmatch(r"api/(cli\w*|config)\.py|api/cli/.*|target/hub\w*\.py", name))


def may_print(name: str) -> bool:
    return bool(re.fullmatch(r"api/cli\w*\.py|api/cli/.*|target/hub\w*\.py|bench/.*", name))


def forbidden(tree: ast.AST, name: str) -> list[str]:
    """Uses, in the module called `name`, of what the house forbids."""
    wrong = []
    for module, line in imported(tree, "spec_serve"):
        if module.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "marshal"):
            wrong.append(f"line {line}: {module} runs code of whoever wrote the file")
        if module in ("os.environ", "os.getenv") and not may_read_environment(name):
            wrong.append(f"line {line}: {module}: behaviour must not hang on the environment")
        if module == "torch.load":
            wrong.append(f"line {line}: torch.load runs code of whoever wrote the file")
    for node in ast.walk(tree):
        used = chain(node) if isinstance(node, ast.Attribute) else ""
        if used == "torch.load":
            wrong.append(f"line {node.lineno}: torch.load runs code of whoever wrote the file")
        if used in ("os.environ", "os.getenv") and not may_read_environment(name):
            wrong.append(f"line {node.lineno}: {used}: behaviour must not hang on the environment")
        if not isinstance(node, ast.Call):
            continue
        if chain(node.func) == "print" and not may_print(name):
            wrong.append(f"line {node.lineno}: print belongs to the command line")
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                wrong.append(f"line {node.lineno}: trust_remote_code runs code of a model's author")
    return wrong


def too_long(tree: ast.AST) -> list[str]:
    """Functions beyond FUNCTION_LINES, their docstring not counted."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = node.lineno
            if ast.get_docstring(node) is not None:
                start += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            lines = (node.end_lineno or start) - start + 1
            if lines > FUNCTION_LINES:
                wrong.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return wrong


def test_imports_go_down_the_ladder(trees: Trees) -> None:
    def rule(path: Path) -> list[str]:
        return climbs(trees[path], path.relative_to(ROOT).parts[0], package_of(path))

    assert broken(MODULES, rule) == ""


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("cache", "import spec_serve.kernels.base"),
        ("cache", "from spec_serve import kernels"),
        ("target", "def f():\n    from spec_serve.draft.base import Drafter"),
        ("draft", "from ..spec import engine"),
        ("spec", "if TYPE_CHECKING:\n    from spec_serve.api.messages import X"),
        ("api", "from cache.tree import TokenTree"),
        ("api", "from spec_serve.bench import latency"),
    ],
)
def test_an_import_up_the_ladder_is_found(folder: str, source: str) -> None:
    assert climbs(ast.parse(source), folder, f"spec_serve.{folder}") != []


def test_an_import_down_the_ladder_is_allowed() -> None:
    source = "from ..cache.tree import Tree\nimport spec_serve.target.model\nfrom . import grow"
    assert climbs(ast.parse(source), "draft", "spec_serve.draft") == []


# One process for all: ours are forgotten before each, so that each is imported as if alone.
EACH_ALONE = """
import importlib, sys
wrong = []
for name in sys.argv[1:]:
    for known in [known for known in sys.modules if known.startswith("spec_serve")]:
        del sys.modules[known]
    importlib.import_module(name)
    heavy = [kind for kind in ("torch", "transformers") if sys.modules.pop(kind, None)]
    wrong += [f"{name} imports {kind}" for kind in heavy]
sys.exit(", ".join(wrong) or 0)
"""


def imported_alone(names: list[str], *places: Path) -> subprocess.CompletedProcess[str]:
    """`EACH_ALONE` run on them; `places` are looked through first."""
    add = f"import sys; sys.path[:0] = {[str(place) for place in places]}\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", add + EACH_ALONE, *names],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_light_modules_do_not_import_torch() -> None:
    assert len(LIGHT) > 10
    ran = imported_alone([dotted(path) for path in LIGHT])
    assert ran.returncode == 0, ran.stderr


def test_a_light_module_that_imports_torch_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "one.py").write_text("def later():\n    import torch\n")
    for name in ("two", "three"):
        (tmp_path / f"{name}.py").write_text("import torch\n")
    ran = imported_alone(["one", "two", "three"], tmp_path)
    assert (ran.returncode, ran.stderr) == (1, "two imports torch, three imports torch\n")


def test_no_module_uses_what_is_forbidden(trees: Trees) -> None:
    assert broken(MODULES, lambda path: forbidden(trees[path], relative(path))) == ""


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("target/weights.py", "import pickle"),
        ("target/weights.py", "from pickle import loads"),
        ("target/weights.py", "import torch\ntorch.load('x')"),
        ("target/tokenizer.py", "load('x', trust_remote_code=True)"),
        ("spec/engine.py", "import os\nfast = os.environ.get('FAST')"),
        ("spec/engine.py", "from os import environ"),
        ("spec/engine.py", "print('here')"),
    ],
)
def test_what_is_forbidden_is_found(name: str, source: str) -> None:
    assert forbidden(ast.parse(source), name) != []


def test_the_command_line_may_print_and_read_the_environment() -> None:
    assert forbidden(ast.parse("import os\nprint(os.environ['HOME'])"), "api/cli.py") == []


def test_every_module_says_what_it_knows(trees: Trees) -> None:
    def rule(path: Path) -> list[str]:
        said = ast.get_docstring(trees[path])
        return [] if said else ["opens without a docstring: what it knows and what it does not"]

    assert broken(MODULES + BESIDE, rule) == ""


def test_no_module_is_too_long() -> None:
    def rule(path: Path) -> list[str]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        return [f"{lines} lines"] if lines > MODULE_LINES else []

    assert broken(MODULES + BESIDE, rule) == ""


def test_no_function_is_too_long(trees: Trees) -> None:
    assert broken(MODULES + BESIDE, lambda path: too_long(trees[path])) == ""


def test_what_is_broken_names_its_file() -> None:
    short = broken(BESIDE, lambda path: ["no"] if path == Path(__file__).resolve() else [])
    assert short == "tests/test_architecture.py: no"


def test_a_function_that_is_too_long_is_found() -> None:
    body = "    x = 1\n" * FUNCTION_LINES
    assert too_long(ast.parse(f"def f():\n{body}")) != []
    assert too_long(ast.parse(f'def f():\n    """Said."""\n{body[10:]}')) == []


def test_the_packages_listed_are_the_folders_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for folder in LADDER for path in (ROOT / folder).rglob("*.py")}
    expected = {dotted(folder / "__init__.py"): relative(folder) for folder in folders}
    assert sorted(listed["packages"]) == sorted(expected)
    assert listed["package-dir"] == expected
    assert [relative(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_bare_folders_are_not_on_the_path() -> None:
    # `python -m pytest` puts the root there, and then transformers finds our `kernels` for its own.
    places = [Path(place or ".").resolve() for place in sys.path]
    assert ROOT not in places and ROOT / "tests" not in places, "run `pytest`, not `python -m`"


def test_type_checkers_see_every_folder() -> None:
    links = {path.name: path.resolve() for path in (ROOT / ".typing/spec_serve").iterdir()}
    moved = {name: ROOT / place for place, name in MOVED.items()}
    assert links == {folder: ROOT / folder for folder in LADDER} | moved


# Pieced together, or this file would find itself.
HOSTS = re.compile("files.python" + r"hosted\.org|opt/" + "pypi|opt/" + "wheels|artifact" + "ory")
PATHS = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/[\w.]")


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine() -> None:
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if HOSTS.search(line) or PATHS.search(line):
                wrong.append(f"{relative(path)}:{number}")
    assert wrong == []


def test_a_machines_path_is_found() -> None:
    assert PATHS.search("cd " + "/work" + "/main")
    assert PATHS.search('"' + "/root" + '/.cache"')
    assert not PATHS.search("src" + "/work" + "/main")
