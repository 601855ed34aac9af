"""litellm, langchain-openai and `llm` against the server, each in a process of its own.

They import half of the world, slowly, and warn about it; here only what they say is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def ran(command: list[str], home: Path, **more: str) -> str:
    """What a client printed; it keeps its files in `home`."""
    env = os.environ | {"HOME": str(home), "PYTHONUTF8": "1", "NO_PROXY": "*", **more}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env, cwd=home, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def tried(name: str, url: str, home: Path, **more: str) -> Any:
    out = ran([sys.executable, "-P", str(HERE / f"try_{name}.py"), url], home, **more)
    return json.loads(out.splitlines()[-1])


def test_litellm(echo_url: str, tmp_path: Path) -> None:
    # Without this it asks its makers' server for prices first.
    told = tried("litellm", echo_url, tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert told["whole"] == told["streamed"] == "hello 😀 world"
    assert told["tokens"] == 17 and told["usage"] == [17] and told["reason"] == "stop"
    assert "temperature" in told["error"] and told["text"] == "abc"


def test_langchain(echo_url: str, tmp_path: Path) -> None:
    told = tried("langchain", echo_url, tmp_path)
    assert told["whole"] == told["streamed"] == "hello 😀 world"
    assert told["tokens"] == told["usage"] == 17 and told["text"] == "abc"
    assert told["call"] == told["streamed_call"] == ["weather", {"city": "Oslo"}]
    assert "rain in Oslo" in told["after"]


def test_llm(echo_url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: echo\n  model_name: echo\n  api_base: {echo_url}\n"
    )
    command = [sys.executable, "-P", "-m", "llm", "prompt", "-m", "echo", "hello 😀 world"]
    keys = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    assert ran(command, tmp_path, **keys).strip() == "hello 😀 world"
    assert ran([*command, "--no-stream"], tmp_path, **keys).strip() == "hello 😀 world"
