"""Fixtures of the transports' tests: a server in this process with either WebSocket implementation.

Knows the settings that tests/api/serving.py gives its servers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.api import serving


@pytest.fixture(params=["picows", "websockets"])
def each_websocket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once with each; the value names it."""
    name = str(request.param)
    monkeypatch.setattr(serving, "SETTINGS", replace(serving.SETTINGS, ws_impl=name))
    return name
