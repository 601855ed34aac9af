"""Whether a port can be listened on, asked before anything large is loaded.

Only a look: somebody else may take the port a moment later, which the server then says itself.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def taken(host: str, ports: dict[str, int | None]) -> str | None:
    """Why one of the ports can't be listened on, or None. Port 0 and None are always free."""
    wanted = [(name, port) for name, port in ports.items() if port]
    if len({port for _, port in wanted}) < len(wanted):
        return "grpc-port: must differ from port"
    for name, port in wanted:
        try:
            found = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            return f"host: {host!r} is not an address of this machine: {error.strerror}"
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":  # elsewhere this option would share a port in use
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return f"{name}: {port} is in use; choose another, or 0 for a free one"
                return f"{name}: can't listen on {host}:{port}: {error.strerror}"
    return None
