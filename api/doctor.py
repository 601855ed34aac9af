"""What works on this machine, and for what doesn't: why. Findings, not prose.

Looks at Python, packages, devices, attention kernels, compilers, models and ports. Loads no model
and never fails itself: what can't be found out is a finding too. Printing is cli_doctor.py's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from spec_serve.api.ports import taken

# package on an index -> whether serving is impossible without it
PACKAGES = {
    "torch": True,
    "numpy": True,
    "safetensors": True,
    "tokenizers": True,
    "jinja2": True,
    "msgspec": True,
    "uvicorn": True,
    "websockets": True,
    "grpcio": True,
    "protobuf": True,
    "uvloop": False,
    "httptools": False,
    "transformers": False,
    "huggingface_hub": False,
    "rich": False,
}
COMPILERS = {
    "cc": "C; needed by triton",
    "c++": "C++; needed by torch.compile on a CPU",
    "nvcc": "CUDA; needed by flashinfer where it compiles kernels",
    "ninja": "needed to build extensions",
}
# attention kernels by the name given to --attention -> modules that hold the library
KERNELS = {
    "torch": (),
    "triton": ("triton",),
    "flashinfer": ("flashinfer",),
    "flash-attn": ("vllm/vllm_flash_attn", "vllm_flash_attn"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. said: what it is, or why it doesn't work. needed: nothing works without
    it."""

    area: str
    name: str
    works: bool
    said: str
    needed: bool = False


def examine(host: str, port: int, grpc_port: int | None) -> Iterator[Finding]:
    """Everything, in the order of the report."""
    parts: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("machine", machine),
        ("packages", packages),
        ("devices", devices),
        ("attention", kernels),
        ("compilers", compilers),
        ("models", models),
        ("ports", lambda: ports(host, port, grpc_port)),
    )
    for area, part in parts:
        try:
            yield from part()
        except Exception as error:  # a broken installation must not silence the rest
            yield Finding(area, "examination", False, told(error))


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def machine() -> Iterator[Finding]:
    """Python, processor and memory."""
    yield Finding("machine", "python", sys.version_info >= (3, 11), platform.python_version(), True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "processor", True, f"{platform.machine()}, {cores} cores")
    found = memory()
    if found is None:
        yield Finding("machine", "memory", False, "can't be found out on this system")
    else:
        total, free = found
        said = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB available"
        yield Finding("machine", "memory", free >= 1 << 30, said)


def memory(path: Path = Path("/proc/meminfo")) -> tuple[int, int] | None:
    """Bytes of memory (all, available), or None where /proc/meminfo doesn't exist."""
    try:
        held = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return int(held["MemTotal"].split()[0]) << 10, int(held["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError, IndexError):
        return None


def packages() -> Iterator[Finding]:
    """Versions of what is installed beside this package."""
    for name, needed in PACKAGES.items():
        try:
            yield Finding("packages", name, True, metadata.version(name), needed)
        except metadata.PackageNotFoundError:
            yield Finding("packages", name, False, f"not installed: pip install {name}", needed)


def devices() -> Iterator[Finding]:
    """The CPU and the GPUs as torch sees them."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("devices", "cpu", True, f"{capability}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            why = f"this torch ({torch.__version__}) is built without CUDA"
        elif shutil.which("nvidia-smi") is None:
            why = "no NVIDIA driver is installed"
        else:
            why = f"torch is built for CUDA {torch.version.cuda}, but the driver shows it no GPU"
        yield Finding("devices", "cuda", False, why)
        return
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        said = (
            f"{found.name}, capability {found.major}.{found.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        yield Finding("devices", f"cuda:{i}", True, said)


def kernels() -> Iterator[Finding]:
    """Attention kernels: is the library there, does it load, does this version use it."""
    yield compiled()
    import torch

    from spec_serve.kernels.base import pick_backend, unfit

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    try:
        reason = unfit(torch.device(device), "triton")
    except Exception as error:  # a driver that does not answer
        yield Finding("attention", "auto", False, told(error))
    else:
        yield Finding("attention", "auto", True, f"torch: {reason}" if reason else "triton")
    for name, places in KERNELS.items():
        found = [place for place in places if present(place)]
        if places and not found:
            yield Finding("attention", name, False, f"{' or '.join(places)}: not installed")
            continue
        library = found[0].replace("/", ".") if found else ""
        if library and not gpu:
            yield Finding("attention", name, False, f"{library} is installed, but there is no GPU")
            continue
        try:
            if library:
                importlib.import_module(library)
            made = pick_backend(device, name)
        except Exception as error:  # whatever a broken library raises on import
            why = f"{library} is installed; " if library else ""
            yield Finding("attention", name, False, why + told(error))
        else:
            said = ", ".join(filter(None, (made.name, library)))
            yield Finding("attention", name, True, said)


def compiled() -> Finding:
    """The package's own compiled kernels for CPUs."""
    from spec_serve.kernels.cpu import native

    try:
        isa = native.isa()
    except native.NativeUnavailable as error:
        return Finding("attention", "cpu", False, f"{told(error)}; models run in torch")
    return Finding("attention", "cpu", True, f"compiled kernels, {isa}")


def present(place: str) -> bool:
    """Whether a module "a" or a folder "a/b" in the package a is installed; imports nothing."""
    package, _, inner = place.partition("/")
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if found is None or not inner:
        return found is not None
    return any((Path(at) / inner).is_dir() for at in found.submodule_search_locations or ())


def compilers() -> Iterator[Finding]:
    """Programs that libraries call to build kernels."""
    for name, use in COMPILERS.items():
        path = shutil.which(name)
        if path is None:
            yield Finding("compilers", name, False, f"not found ({use})")
            continue
        try:
            ran = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            yield Finding("compilers", name, False, f"{path}: {told(error)}")
            continue
        lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
        version = next((line for line in lines if "release" in line), lines[0] if lines else "")
        yield Finding("compilers", name, ran.returncode == 0, version or path)


def models() -> Iterator[Finding]:
    """Models that are here, and room for more."""
    from spec_serve.target.hub import cache_dir, list_local

    place = cache_dir()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    said = f"{place}, {free / 2**30:.1f} GiB free"
    yield Finding("models", "cache", free > 1 << 30 and os.access(there, os.W_OK), said)
    for model in list_local():
        yield Finding("models", str(model.name), True, str(model.path))


def ports(host: str, port: int, grpc_port: int | None) -> Iterator[Finding]:
    """Whether the ports to serve on are free."""
    for name, number in (("port", port), ("grpc-port", grpc_port)):
        why = taken(host, {name: number})
        said = why or (f"{host}:{number} is free" if number else "nothing to check")
        yield Finding("ports", name, why is None, said)
