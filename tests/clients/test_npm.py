"""Clients from npm: openai, Vercel's AI SDK, and @grpc/grpc-js by reflection.

Installed once, as package-lock.json says, into a folder of the user's cache; a script each, run by
node. Skipped only where there is no node.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.api.processes import Running

HERE = Path(__file__).parent
FILES = ("package.json", "package-lock.json", ".npmrc")


@pytest.fixture(scope="session")
def modules() -> Path:
    """The folder node_modules."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()
    cache = Path.home() / ".cache" / "spec-serve"
    place = cache / f"npm-{lock[:16]}"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            fresh = Path(made) / "npm"
            fresh.mkdir()
            for name in FILES:
                shutil.copy(HERE / name, fresh / name)
            command = ["npm", "ci", "--omit=dev", "--ignore-scripts"]
            done = subprocess.run(
                command, cwd=fresh, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            try:
                fresh.rename(place)
            except OSError:  # another test process was quicker
                assert place.exists()
    return place / "node_modules"


def tried(name: str, address: str, modules: Path, folder: Path) -> Any:
    """What a script said; it finds its modules beside itself."""
    (folder / "node_modules").symlink_to(modules)
    script = shutil.copy(HERE / f"try_{name}.mjs", folder)
    done = subprocess.run(
        ["node", str(script), address], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openai(echo_url: str, modules: Path, tmp_path: Path) -> None:
    told = tried("openai", echo_url, modules, tmp_path)
    assert told["whole"] == "hello 😀 world" and told["streamed"] == ["hello 😀 world"] * 2
    assert told["usage"] == 34 and told["error"] == [400, "temperature"]
    assert told["reason"] == "tool_calls" and told["call"]["name"] == "weather"
    assert json.loads(told["call"]["arguments"]) == {"city": "Oslo"}
    assert told["models"] == ["echo"]


def test_ai_sdk(echo_url: str, modules: Path, tmp_path: Path) -> None:
    told = tried("ai", echo_url, modules, tmp_path)
    assert told["whole"] == told["streamed"] == "hello 😀 world"
    assert told["tokens"] == told["usage"] == 17
    assert told["reason"] == "tool-calls" and told["call"] == ["weather", {"city": "Oslo"}]


def test_grpc_by_reflection(echo: Running, modules: Path, tmp_path: Path) -> None:
    told = tried("grpc", echo.grpc, modules, tmp_path)
    assert {"specserve.v1.SpecServe", "grpc.health.v1.Health"} <= set(told["services"])
    assert told["text"] == "hello 😀 world" and told["first"] and int(told["tokens"]) == 17
    assert told["refused"] == 3 and told["cancelled"] == 1
