"""Two servers for all client tests: one that echoes, one with a tiny model that speculates.

Clients are imported inside tests or run in processes of their own, as people would run them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import servers
from tests.api.processes import Running, echo_server
from tests.tiny import write_tiny_model_dir


@pytest.fixture(scope="session")
def echo() -> Iterator[Running]:
    """Answers with the messages' text, three tokens a step."""
    with echo_server({"pause": 0.001, "context": 1 << 16}) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A real engine; target and draft are the same tiny model, and there are look-ups."""
    folder = tmp_path_factory.mktemp("clients")
    model = write_tiny_model_dir(folder / "tiny")
    with servers.start(model, folder / "log", "--draft", f"{model}+lookup") as server:
        yield server


@pytest.fixture
def echo_url(echo: Running) -> str:
    """Base address for OpenAI's clients."""
    return echo.health.removesuffix("/health") + "/v1"


@pytest.fixture
def tiny_url(tiny: servers.Server) -> str:
    """The same, of the real engine."""
    return tiny.health.removesuffix("/health") + "/v1"
