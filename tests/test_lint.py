"""Lint and types as tests, so that the one test command enforces them.

Knows how the two tools are started and nothing of what they check: that stands in
`pyproject.toml`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> None:
    """Run one tool as a module; fails with all it has to say."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        pytest.fail(ran.stdout + ran.stderr, pytrace=False)


def test_ruff_is_content() -> None:
    run("ruff", "check", "--output-format", "concise", ".")


@pytest.mark.slow
def test_mypy_is_content() -> None:
    run("mypy")
