"""What machine a comparison ran on: processor, cores, memory, instruction sets, how busy it was.

Knows the operating system's own figures and measures nothing.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

SETS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")


def machine() -> dict[str, Any]:
    """{"cpu", "cores", "memory_gib", "sets", "system", "load"}; load: average of a minute."""
    cpu, sets = platform.processor() or platform.machine(), ""
    with_info = Path("/proc/cpuinfo")
    if with_info.exists():
        facts: dict[str, str] = {}
        for line in with_info.read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
        cpu = facts.get("model name", cpu)
        flags = (facts.get("flags") or facts.get("Features") or "").split()
        sets = " ".join(name for name in SETS if name in flags)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu, "cores": cores(), "memory_gib": round(memory, 1), "sets": sets,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
