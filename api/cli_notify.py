"""Telling a service manager that the server is ready or ending, the way systemd asks for it.

The protocol is a datagram to the socket named by NOTIFY_SOCKET (sd_notify(3)); without one nothing
is done. Failing to tell never stops a server.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str] | None = None) -> bool:
    """Send for example "READY=1"; whether somebody was told."""
    environ = os.environ if environ is None else environ
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.connect(address)
        told.sendall(state.encode())
        return True
    return False
