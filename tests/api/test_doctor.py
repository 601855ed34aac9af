"""The doctor's findings: on this machine as it is, and where something is missing or broken.

What is missing is simulated by replacing the look-up that would find it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from spec_serve.api import cli, doctor
from spec_serve.api.doctor import Finding


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_what_is_needed_is_here() -> None:
    found = list(doctor.examine("127.0.0.1", 0, None))
    areas = list(dict.fromkeys(finding.area for finding in found))
    expected = ["machine", "packages", "devices", "attention", "compilers", "models", "ports"]
    assert areas == expected
    assert [f for f in found if f.needed and not f.works] == []
    named = {(f.area, f.name): f for f in found}
    assert named["packages", "torch"].said == metadata.version("torch")
    assert named["attention", "torch"].works
    assert named["devices", "cpu"].said.startswith(torch.backends.cpu.get_cpu_capability())
    assert all(f.said and "\n" not in f.said for f in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("built", "driver", "said"),
    [
        (None, None, "built without CUDA"),
        ("13.0", None, "no NVIDIA driver"),
        ("13.0", "here", "the driver shows it no GPU"),
    ],
)
def test_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, built: str | None, driver: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: driver)
    found = by_name(doctor.devices())["cuda"]
    assert (found.works, said in found.said) == (False, True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def missing(name: str) -> str:
        if name in ("grpcio", "rich"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    found = by_name(doctor.packages())
    assert found["grpcio"] == Finding(
        "packages", "grpcio", False, "not installed: pip install grpcio", needed=True
    )
    assert (found["rich"].works, found["rich"].needed) == (False, False)
    assert found["msgspec"].works


def test_libraries_of_kernels_are_found_alone_and_inside_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm" / "vllm_flash_attn").mkdir(parents=True)
    # Importing vllm takes half a minute; the doctor must not.
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.present("vllm/vllm_flash_attn")
    assert not doctor.present("vllm/other")
    assert not doctor.present("no_such_package_at_all/inner")
    assert "vllm" not in sys.modules
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = by_name(doctor.kernels())
    assert "but there is no GPU" in found["flash-attn"].said
    assert not found["flash-attn"].works
    assert found["torch"].works
    assert found["auto"].said.startswith("torch: triton's kernels run on NVIDIA GPUs, not on cpu")


def test_a_library_that_does_not_load_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise OSError('no libcudart here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = by_name(doctor.kernels())["flashinfer"]
    assert found.said == "flashinfer is installed; OSError: no libcudart here"
    assert not found.works


def test_compilers_missing_and_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("cc", "echo cc 1.2; echo more"), ("nvcc", "echo broken >&2; exit 3")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    real = doctor.shutil.which
    monkeypatch.setattr(
        doctor.shutil, "which", lambda name: real(name) if name in ("cc", "nvcc") else None
    )
    found = by_name(doctor.compilers())
    assert (found["cc"].works, found["cc"].said) == (True, "cc 1.2")
    assert (found["nvcc"].works, found["nvcc"].said) == (False, "broken")
    assert (found["ninja"].works, found["ninja"].said[:9]) == (False, "not found")


def test_a_hanging_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*args: object, **keywords: object) -> None:
        raise subprocess.TimeoutExpired("cc", 10)

    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor.subprocess, "run", hangs)
    assert all("timed out" in f.said and not f.works for f in doctor.compilers())


def test_a_broken_part_does_not_silence_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("bad install\nsecond line")
        yield

    monkeypatch.setattr(doctor, "devices", broken)
    found = list(doctor.examine("127.0.0.1", 0, None))
    assert Finding("devices", "examination", False, "RuntimeError: bad install") in found
    assert found[-1].area == "ports"


def test_memory_is_read_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n")
    assert doctor.memory(file) == (2 << 20, 1 << 20)
    file.write_text("nothing")
    assert doctor.memory(file) is None
    assert doctor.memory(tmp_path / "gone") is None


def test_the_command_reports_ports_and_fails_without_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert cli.main(["doctor", "--json", "--port", str(port), "--grpc-port", "0"]) == 0
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert (found["port"]["works"], "in use" in found["port"]["said"]) == (False, True)
    monkeypatch.setattr(doctor, "PACKAGES", {"no-such-package": True})
    assert cli.main(["doctor", "--grpc-port", "off", "--port", "0"]) == 1
    out = capsys.readouterr().out
    assert "NO  no-such-package" in out
    assert "serving is impossible without: no-such-package" in out


def test_compiled_kernels_are_told_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_serve.kernels.cpu import native

    found = doctor.compiled()
    assert found.works and native.isa() in found.said

    def missing() -> None:
        raise native.NativeUnavailable("not built: the installation found no C++ compiler")

    monkeypatch.setattr(native, "load", missing)
    found = doctor.compiled()
    assert not found.works and "no C++ compiler" in found.said
