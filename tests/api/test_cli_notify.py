"""The word to a service manager."""

from __future__ import annotations

import socket
from pathlib import Path

from spec_serve.api.cli_notify import notify


def test_it_is_told_where_the_variable_says(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        assert notify("READY=1", {"NOTIFY_SOCKET": str(path)})
        assert manager.recv(64) == b"READY=1"


def test_an_abstract_address_begins_with_an_at_sign() -> None:
    name = f"spec-serve-test-{id(object())}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        assert notify("STOPPING=1", {"NOTIFY_SOCKET": "@" + name})
        assert manager.recv(64) == b"STOPPING=1"


def test_nobody_to_tell_is_no_error(tmp_path: Path) -> None:
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "none")})
    assert not notify("READY=1", {"NOTIFY_SOCKET": "vsock:1"})
