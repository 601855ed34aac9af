"""TLS on every port: who is let in, what is refused at start, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from spec_serve.api import tls
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.api.server_settings import ServeSettings
from tests.api.processes import echo_server
from tests.api.serving import served

if shutil.which("openssl") is None:
    pytest.skip("certificates are made with openssl", allow_module_level=True)


def openssl(where: Path, *words: str) -> None:
    subprocess.run(("openssl", *words), cwd=where, check=True, capture_output=True)


def authority(where: Path, name: str) -> None:
    openssl(
        where, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-days", "2",
        "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
    )  # fmt: skip


def signed(where: Path, name: str, by: str) -> None:
    (where / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        where, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}",
    )  # fmt: skip
    openssl(
        where, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{by}.pem", "-CAkey", f"{by}.key",
        "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "names",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca signed server and friend; other signed stranger and renewed."""
    where = tmp_path_factory.mktemp("pems")
    authority(where, "ca")
    authority(where, "other")
    for name, by in (
        ("server", "ca"), ("friend", "ca"), ("stranger", "other"), ("renewed", "ca"),
    ):  # fmt: skip
        signed(where, name, by)
    openssl(where, "ec", "-in", "server.key", "-aes128", "-passout", "pass:x", "-out", "locked.key")
    (where / "nonsense.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    (where / "empty.pem").write_text("")
    return where


def settings(pems: Path, cert: str = "server", key: str = "server", ca: str = "") -> dict[str, Any]:
    return {
        "tls_cert": str(pems / f"{cert}.pem") if cert else "",
        "tls_key": str(pems / f"{key}.key") if key else "",
        "tls_client_ca": str(pems / f"{ca}.pem") if ca else "",
    }


def client(pems: Path, ca: str = "ca", own: str = "") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(pems / f"{ca}.pem"))
    if own:
        made.load_cert_chain(pems / f"{own}.pem", pems / f"{own}.key")
    return made


async def health(address: str, context: ssl.SSLContext) -> bytes:
    """The status line, or b"" if TLS came to nothing."""
    host, port = address.partition("://")[2].partition("/")[0].split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        try:
            return (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n")[0]
        finally:
            writer.transport.abort()
    except (OSError, ssl.SSLError):
        return b""


async def hello(address: str, context: ssl.SSLContext) -> str:
    """What comes back from a generation over the WebSocket."""
    kind = Subprotocol(m.JSON)
    async with connect(address, ssl=context, subprotocols=[kind], proxy=None) as socket:
        codec = m.Codec(m.JSON)
        assert isinstance(codec.server_message(await socket.recv()), m.Hello)
        await socket.send(codec.encode(m.Generate("g", prompt="hello over TLS")).decode())
        text = ""
        while True:
            message = codec.server_message(await asyncio.wait_for(socket.recv(), 60))
            if isinstance(message, m.Delta):
                text += message.text
            elif isinstance(message, (m.Finished, m.Error)):
                return text


@pytest.mark.parametrize("implementation", ["picows", "websockets"])
def test_http_and_websocket_speak_tls(pems: Path, implementation: str) -> None:
    async def go() -> None:
        async with served(ws_impl=implementation, **settings(pems)) as (server, url):
            assert url.startswith("wss://127.0.0.1:")
            assert server.addresses()[-1].startswith("https://127.0.0.1:")
            assert await health(url, client(pems)) == b"HTTP/1.1 200 OK"
            assert await health(url, client(pems, "other")) == b""
            assert await hello(url, client(pems)) == "hello over TLS"
            old = client(pems)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            assert await health(url, old) == b"HTTP/1.1 200 OK"
            # Plain bytes on a TLS port end the connection and nothing else.
            host, port = url.removeprefix("wss://").partition("/")[0].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await asyncio.wait_for(reader.read(), 60)
            writer.close()

    uvloop.run(go())


@pytest.mark.parametrize("implementation", ["picows", "websockets"])
def test_only_clients_with_a_certificate_get_in(pems: Path, implementation: str) -> None:
    async def go() -> None:
        async with served(ws_impl=implementation, **settings(pems, ca="ca")) as (_, url):
            assert await health(url, client(pems)) == b""
            assert await health(url, client(pems, own="stranger")) == b""
            assert await health(url, client(pems, own="friend")) == b"HTTP/1.1 200 OK"
            assert await hello(url, client(pems, own="friend")) == "hello over TLS"

    uvloop.run(go())


def test_a_renewed_certificate_is_taken_up(pems: Path, tmp_path: Path) -> None:
    for name in ("server.pem", "server.key", "ca.pem"):
        shutil.copy(pems / name, tmp_path / name)

    async def name(url: str) -> str:
        host, port = url.removeprefix("wss://").partition("/")[0].split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=client(pems))
        found: Any = writer.get_extra_info("peercert")
        writer.transport.abort()
        return str(found["subject"][0][0][1])

    async def go() -> None:
        async with served(**settings(tmp_path)) as (server, url):
            assert await name(url) == "server"
            for end in ("pem", "key"):
                shutil.copy(pems / f"renewed.{end}", tmp_path / f"server.{end}")
            server.reread()
            assert await name(url) == "renewed"
            (tmp_path / "server.pem").write_text("nonsense")
            server.reread()
            assert await name(url) == "renewed"

    uvloop.run(go())


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ({"key": ""}, "tls-key: is needed beside tls-cert"),
        ({"cert": ""}, "tls-cert: is needed beside tls-key"),
        ({"cert": "", "key": "", "ca": "ca"}, "tls-client-ca: needs tls-cert and tls-key"),
        ({"cert": "nowhere"}, "tls-cert: .*nowhere.pem: No such file"),
        ({"key": "nowhere"}, "tls-key: .*nowhere.key: No such file"),
        ({"ca": "nowhere"}, "tls-client-ca: .*nowhere.pem: No such file"),
        ({"key": "friend"}, "tls-key: .*friend.key is not the key of .*server.pem"),
        ({"key": "locked"}, "tls-cert: .* unencrypted key"),
        ({"cert": "nonsense"}, "tls-cert: .*nonsense.pem and .* are not a certificate"),
        ({"cert": "empty"}, "tls-cert: .*empty.pem"),
        ({"ca": "nonsense"}, "tls-client-ca: .*nonsense.pem holds no certificate"),
        ({"ca": "empty"}, "tls-client-ca: .*empty.pem holds no certificate"),
    ],
)
def test_files_that_will_not_do_are_named_at_start(
    pems: Path, made: dict[str, str], named: str
) -> None:
    wrong = ServeSettings(**settings(pems, **made))
    with pytest.raises(ValueError, match=named):
        tls.context(wrong)
    with pytest.raises(ValueError, match=named):
        tls.grpc_credentials(wrong)
    assert tls.context(ServeSettings()) is tls.grpc_credentials(ServeSettings()) is None


def greeted(address: str, pems: Path, ca: str = "ca", own: str = "") -> str:
    """The text that gRPC's Generate brings, or the status it fails with."""
    pair: tuple[bytes | None, bytes | None] = (None, None)
    if own:
        pair = ((pems / f"{own}.key").read_bytes(), (pems / f"{own}.pem").read_bytes())
    credentials = grpc.ssl_channel_credentials((pems / f"{ca}.pem").read_bytes(), *pair)
    with grpc.secure_channel(address, credentials) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        try:
            events = list(stub.Generate(pb.GenerateRequest(prompt="hello over TLS"), timeout=60))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "".join(event.delta.text for event in events if event.HasField("delta"))


def test_grpc_speaks_tls_and_asks_for_certificates(pems: Path) -> None:
    with echo_server(**settings(pems, ca="ca")) as server:
        address = server.grpc
        assert server.ws.startswith("wss://") and server.health.startswith("https://")
        assert greeted(address, pems, own="friend") == "hello over TLS"
        assert greeted(address, pems) == greeted(address, pems, own="stranger") == "UNAVAILABLE"
        assert greeted(address, pems, ca="other", own="friend") == "UNAVAILABLE"
    with echo_server(**settings(pems)) as server:
        assert greeted(server.grpc, pems) == "hello over TLS"
