"""Modules that are imported when a test first uses them, not when tests are collected.

Every test process collects all files but runs a third of them; clients and models of other people
take seconds to import. Imported by tests only.
"""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a module. `real()` is the module itself, for monkeypatch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def real(self) -> Any:
        return importlib.import_module(self._name)

    def __getattr__(self, what: str) -> Any:
        if what.startswith(("_", "pytest")):  # pytest asks this of all that stands in a module
            raise AttributeError(what)
        return getattr(self.real(), what)
