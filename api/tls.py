"""TLS for every port, from PEM files: checked once at start, so that what is wrong is named.

HTTP and WebSocket get an `ssl.SSLContext`, gRPC its own credentials, both from the same files and
with the same rule: with a client CA, who shows no certificate of it is not let in. Knows files and
settings, no sockets.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from spec_serve.api.server_settings import ServeSettings

if TYPE_CHECKING:
    import grpc


def context(settings: ServeSettings) -> ssl.SSLContext | None:
    """What HTTP and WebSocket speak; None without TLS. Raises ValueError naming the setting."""
    if not settings.tls_cert and not settings.tls_key:
        if settings.tls_client_ca:
            raise ValueError("tls-client-ca: needs tls-cert and tls-key")
        return None
    if not settings.tls_cert or not settings.tls_key:
        given, missing = ("tls-cert", "tls-key") if settings.tls_cert else ("tls-key", "tls-cert")
        raise ValueError(f"{missing}: is needed beside {given}")
    _read("tls-cert", settings.tls_cert)
    _read("tls-key", settings.tls_key)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    load(made, settings)
    if settings.tls_client_ca:
        _read("tls-client-ca", settings.tls_client_ca)
        try:
            made.load_verify_locations(settings.tls_client_ca)
        except ssl.SSLError:
            where = settings.tls_client_ca
            raise ValueError(f"tls-client-ca: {where} holds no certificate in PEM") from None
        made.verify_mode = ssl.CERT_REQUIRED
    return made


def load(made: ssl.SSLContext, settings: ServeSettings) -> None:
    """Read certificate and key (again, once they were renewed). Raises ValueError or OSError."""
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        made.load_cert_chain(settings.tls_cert, settings.tls_key, password=lambda: b"")
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in (error.reason or ""):
            raise ValueError(
                f"tls-key: {settings.tls_key} is not the key of {settings.tls_cert}"
            ) from None
        raise ValueError(
            f"tls-cert: {settings.tls_cert} and {settings.tls_key} are not a certificate and an "
            f"unencrypted key in PEM ({error.reason or 'unreadable'})"
        ) from None


def grpc_credentials(settings: ServeSettings) -> grpc.ServerCredentials | None:
    """The same for gRPC; None without TLS. Raises ValueError naming the setting."""
    if context(settings) is None:  # gRPC itself would only log what is wrong with a file
        return None
    import grpc

    pair = (Path(settings.tls_key).read_bytes(), Path(settings.tls_cert).read_bytes())
    ca = Path(settings.tls_client_ca).read_bytes() if settings.tls_client_ca else None
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


def _read(setting: str, path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"{setting}: {path}: {error.strerror or error}") from error
