"""The kernels for AArch64, compiled by a cross compiler and run by an emulator where both are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "cpu" / "csrc"
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-w")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """compare_sets.cpp with every instruction set of the processor."""
    if COMPILER is None or EMULATOR is None:
        pytest.skip("no cross compiler or no emulator for AArch64")
    made = tmp_path_factory.mktemp("neon") / "compare"
    files = [SOURCES / f"{name}.cpp" for name in ("neon", "generic", "processor")]
    files.append(HERE / "compare_sets.cpp")
    subprocess.run([COMPILER, *FLAGS, "-static", f"-I{SOURCES}", "-o", made, *files], check=True)
    return made


@pytest.mark.parametrize(
    ("processor", "sets"),
    [("max", ["i8mm", "dotprod", "neon"]), ("cortex-a76", ["dotprod", "neon"]),
     ("cortex-a72", ["neon"])],
)  # fmt: skip
def test_each_set_a_processor_has_gives_the_bits_of_plain_loops(
    program: Path, processor: str, sets: list[str]
) -> None:
    assert EMULATOR is not None
    done = subprocess.run(
        [EMULATOR, "-cpu", processor, program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{s} compared" for s in sets])
