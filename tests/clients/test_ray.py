"""Two servers behind Ray Serve's prefix router: a prompt goes to where its prefix is cached.

Run only where $SPEC_SERVE_RAY names a Python that has `ray[serve]` and pyarrow, in an environment
of its own: it is half a gigabyte.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.servers import start
from tests.tiny import write_tiny_model_dir

PYTHON = os.environ.get("SPEC_SERVE_RAY", "")
PREFIXES = ("the other " * 5, "in the end " * 5)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs ray[serve]: $SPEC_SERVE_RAY")
def test_a_prefix_stays_with_its_server(tmp_path: Path) -> None:
    model = write_tiny_model_dir(tmp_path / "tiny")
    prompts = [prefix + "x" * turn for turn in range(6) for prefix in PREFIXES]
    script = Path(__file__).parent / "try_ray.py"
    with start(model, tmp_path / "a.log") as one, start(model, tmp_path / "b.log") as two:
        urls = {one.http, two.http}
        done = subprocess.run(
            [PYTHON, str(script), *sorted(urls)],
            input=json.dumps(prompts), capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        # Ray itself prints there too.
        (said,) = (line for line in done.stdout.splitlines() if line.startswith("[["))
        found = json.loads(said)
    for at in range(len(PREFIXES)):
        mine = found[at :: len(PREFIXES)]
        assert len({url for url, _, _ in mine}) == 1
        assert all(cached >= tokens - 2 for _, tokens, cached in mine[1:])
    assert {url for url, _, _ in found} == urls
