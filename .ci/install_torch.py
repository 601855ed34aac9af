"""Install PyTorch into the environment whose Python runs this file, without unwanted CUDA.

Knows the order in which builds are tried: what is there already, the ordinary build where an
NVIDIA GPU is found, PyTorch's own CPU index, and last the configured package index if what it
offers turns out to be a CPU build. A build is judged by its metadata before anything is fetched
for good. Ends by writing the version found as a constraint, so that nothing replaces it later.
Knows nothing of the project itself and needs only the standard library and pip.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MINIMUM = (2, 9)
WANTED = "torch>=2.9"
FALLBACK = "torch==2.13.0"
# Triton is a compiler with an interpreter, which tests use; by itself it brings no CUDA.
CUDA_PREFIXES = ("nvidia-", "cuda-", "pytorch-triton")
# Tried beside a CPU build of torch, which asks for none. A CUDA build names its own.
INTERPRETER = "triton==3.7.1"
# pip from this version on reads metadata in a dry run instead of fetching whole wheels.
PIP_WITH_LIGHT_DRY_RUN = (23, 3)


class NotInstalled(Exception):
    """One way of getting torch did not work; the message says why."""


class WouldBringCuda(Exception):
    """The installation would fetch CUDA for a machine without a GPU; the message says how."""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def pip(*arguments: str, environment: dict[str, str] | None = None, quiet: bool = False) -> int:
    """Run this interpreter's pip; returns its exit status."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        command, env=environment, stdout=sink, stderr=sink, check=False
    ).returncode


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi is there and finds a device."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU" in found.stdout


def installed_torch() -> str | None:
    """The version of the torch in this environment, else None.

    Asked of the metadata: right after its own installation torch may still lack dependencies.
    """
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def canonical(name: str) -> str:
    """The name as indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")


def cuda_parts(item: dict[str, Any]) -> list[str]:
    """The CUDA packages that one entry of a pip report is, or asks for on this machine."""
    # pip's own copy: the only marker evaluator a fresh environment has.
    from pip._vendor.packaging.requirements import Requirement

    about = item["metadata"]
    names = [about["name"]]
    for line in about.get("requires_dist", []):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names.append(requirement.name)
    return sorted({name for name in names if canonical(name).startswith(CUDA_PREFIXES)})


def planned(*arguments: str, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What `pip install *arguments` would install, as the entries of its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        status = pip(
            *("install", "--dry-run", "--quiet", "--report", str(report), *arguments),
            environment=environment,
            quiet=True,
        )
        if status != 0:
            raise NotInstalled(f"pip finds nothing for: {' '.join(arguments)}")
        install: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return install


def install_cpu_build(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Install torch by these pip arguments if, and only if, that gives a CPU build."""
    entries = planned("--no-deps", *arguments, environment=environment)
    torch = next(entry for entry in entries if canonical(entry["metadata"]["name"]) == "torch")
    version = torch["metadata"]["version"]
    parts = [] if version.endswith("+cpu") else cuda_parts(torch)
    if parts:
        raise NotInstalled(f"torch {version} found there is a CUDA build ({', '.join(parts)})")
    if pip("install", "--no-deps", *arguments, environment=environment) != 0:
        raise NotInstalled(f"pip could not install torch {version}")


def only_the_cpu_index() -> dict[str, str]:
    """An environment in which pip asks PyTorch's CPU index alone.

    Configured indexes would be searched as well and could win with a higher version, so the
    configuration is left aside; certificate and proxy are carried over.
    """
    environment = dict(os.environ)
    for setting in ("cert", "proxy"):
        asked = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", f"global.{setting}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0 and asked.stdout.strip():
            environment.setdefault(f"PIP_{setting.upper()}", asked.stdout.strip())
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        environment.pop(name, None)
    environment.update(PIP_CONFIG_FILE=os.devnull, PIP_DEFAULT_TIMEOUT="8", PIP_RETRIES="1")
    return environment


def install_on_cpu_machine() -> None:
    """Try the CPU index, then the configured one; raises NotInstalled if neither serves."""
    reasons = []
    print(f"torch: no NVIDIA GPU here, asking for a CPU build ({CPU_INDEX})", flush=True)
    try:
        install_cpu_build("--index-url", CPU_INDEX, WANTED, environment=only_the_cpu_index())
        return
    except NotInstalled as error:
        reasons.append(str(error))
    print(f"torch: not there; does the configured index have {FALLBACK} for CPU?", flush=True)
    if release(metadata.version("pip")) < PIP_WITH_LIGHT_DRY_RUN:
        pip("install", "--quiet", "--upgrade", "pip")
    try:
        install_cpu_build(FALLBACK)
        return
    except NotInstalled as error:
        reasons.append(str(error))
    raise NotInstalled("; ".join(reasons))


def refuse_cuda(*arguments: str) -> None:
    """Raise WouldBringCuda if `pip install *arguments` would bring a CUDA package."""
    parts = sorted(entry["metadata"]["name"] for entry in planned(*arguments) if cuda_parts(entry))
    if parts:
        raise WouldBringCuda(
            f"there is no NVIDIA GPU here, yet this would install CUDA through {', '.join(parts)}"
        )


def install_torch() -> None:
    """Make sure that some torch >= 2.9 is installed; raises NotInstalled with all reasons."""
    version = installed_torch()
    if version is not None and release(version) >= MINIMUM:
        return
    if has_nvidia_gpu():
        print("torch: NVIDIA GPU found, installing the ordinary build", flush=True)
        if pip("install", WANTED) != 0:
            raise NotInstalled(f"pip could not install {WANTED}")
    else:
        install_on_cpu_machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraint", type=Path, required=True, help="file to write the pin to")
    parser.add_argument(
        "--refuse-cuda",
        nargs=argparse.REMAINDER,
        default=[],
        help="then check what pip install with these arguments would bring",
    )
    given = parser.parse_args()
    try:
        install_torch()
        pin = f"torch=={installed_torch()}\n"
        if pin.endswith("+cpu\n"):
            pin += f"{INTERPRETER}\n"
        # Left alone where nothing changed: make compares the times of files.
        if not given.constraint.exists() or given.constraint.read_text() != pin:
            given.constraint.write_text(pin)
            print(pin.strip(), flush=True)
        if given.refuse_cuda and not has_nvidia_gpu():
            refuse_cuda("--constraint", str(given.constraint), *given.refuse_cuda)
    except WouldBringCuda as error:
        print(f"\nspec-serve set-up stopped: {error}.", file=sys.stderr)
        return 1
    except NotInstalled as error:
        print(
            f"\nspec-serve set-up stopped: {error}.\n"
            "Install a torch >= 2.9 of your choice into this environment and run make again:\n"
            f"  {sys.executable} -m pip install torch --index-url {CPU_INDEX}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
