"""The transports' own tests once more, with the engine behind a socketpair.

Whatever is added to those modules is run here, too. Left out is what is about a thread.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.api import serving, test_openai, test_websocket, test_websocket_limits

LEFT_OUT = {
    "test_an_engine_that_dies_is_told": "another engine is started, see test_process_link.py",
    "test_an_engine_that_dies_ends_a_stream_with_an_error": "the same",
    "test_who_does_not_read_is_not_read_from_and_cannot_keep_the_server": "slow, about sockets",
    "test_a_slow_reader_is_cut_off_and_disturbs_nobody": "the same",
    "test_who_does_not_read_is_cut_off": "the same",
    "test_what_can_not_be_served_is_refused_by_name": "slow, and nothing reaches the engine",
}


@pytest.fixture(autouse=True)
def behind_a_socketpair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PLACE", "process")


def again(module: ModuleType) -> dict[str, object]:
    """The tests and fixtures of a module; its name comes first in the tests' names."""
    short = module.__name__.rpartition(".")[2].removeprefix("test_")
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if name.startswith("test_") and name not in LEFT_OUT:
            found[f"test_{short}_{name.removeprefix('test_')}"] = value
        elif type(value).__name__ == "FixtureFunctionDefinition":
            found[name] = value
    return found


for _module in (test_websocket, test_websocket_limits, test_openai):
    globals().update(again(_module))
