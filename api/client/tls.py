"""Whom a client trusts and who it is: PEM files, for WebSockets and for gRPC alike."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    """ca: authorities to trust, "" = the system's. cert and key: the client's own, for mTLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """For a WebSocket. Raises OSError for a file that can't be read or is not PEM."""
        made = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            made.load_cert_chain(self.cert, self.key or None)
        return made

    def parts(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """For gRPC: (authorities, private key, certificate), None where there is none."""
        ca, key, cert = (
            Path(name).read_bytes() if name else None
            for name in (self.ca, self.key or self.cert, self.cert)
        )
        return ca, key, cert
