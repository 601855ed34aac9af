"""The clients with keys and certificates, against server processes that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_serve.client import ConnectionLost, ServerError, Tls
from tests.api.processes import Running, echo_server
from tests.api.test_client import KINDS, Asking
from tests.api.test_tls import authority, settings, signed

KEY = "a-long-enough-key-for-tests-0123456789"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("pems")
    for name in ("ca", "other"):
        authority(where, name)
    for name, by in (("server", "ca"), ("friend", "ca")):
        signed(where, name, by)
    return where


@pytest.fixture(scope="module")
def server(pems: Path) -> Iterator[Running]:
    with echo_server(api_keys=[KEY], **settings(pems, ca="ca")) as running:
        yield running


def friend(pems: Path) -> Tls:
    return Tls(str(pems / "ca.pem"), str(pems / "friend.pem"), str(pems / "friend.key"))


@pytest.mark.parametrize("kind", KINDS)
def test_key_and_certificate(server: Running, pems: Path, kind: str) -> None:
    assert server.ws.startswith("wss://")
    ask = Asking(server, kind, api_key=KEY, tls=friend(pems))
    assert ask("complete", "hello over TLS").text == "hello over TLS"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [None, "another-key-that-nobody-here-has-given"])
def test_without_the_key(server: Running, pems: Path, kind: str, key: str | None) -> None:
    with pytest.raises(ServerError) as caught:
        Asking(server, kind, api_key=key, tls=friend(pems))("complete", "a")
    assert caught.value.code == "unauthorized" and not caught.value.retryable


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_nobody_trusts(server: Running, pems: Path, kind: str) -> None:
    tls = Tls(str(pems / "other.pem"), str(pems / "friend.pem"), str(pems / "friend.key"))
    with pytest.raises(OSError):  # an SSLError, or gRPC's ConnectionLost
        Asking(server, kind, api_key=KEY, tls=tls, connect_s=2.0)("complete", "a")


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_certificate(server: Running, pems: Path, kind: str) -> None:
    tls = Tls(str(pems / "ca.pem"))
    with pytest.raises((ConnectionLost, OSError)):
        Asking(server, kind, api_key=KEY, tls=tls, connect_s=2.0)("complete", "a")


def test_files_that_are_not_there_are_errors(tmp_path: Path) -> None:
    tls = Tls(str(tmp_path / "none.pem"))
    with pytest.raises(OSError):
        tls.context()
    with pytest.raises(OSError):
        tls.parts()
