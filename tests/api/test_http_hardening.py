"""Whatever bytes come as HTTP: an answer below 500 or the end, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from spec_serve.api import calls, http_limits
from spec_serve.api.calls import MAX_BODY, Call, HttpError, Route
from spec_serve.api.server import Server
from tests.api.serving import served, until

HOST = b"Host: localhost\r\n"
BYE = HOST + b"Connection: close\r\n"


def call(target: bytes, *lines: bytes, method: bytes = b"GET", body: bytes = b"") -> bytes:
    return method + b" " + target + b" HTTP/1.1\r\n" + BYE + b"".join(lines) + b"\r\n" + body


def post(body: bytes, *lines: bytes, length: object = None) -> bytes:
    size = b"Content-Length: %s\r\n" % str(len(body) if length is None else length).encode()
    return call(b"/echo", size, *lines, method=b"POST", body=body)


def chunked(body: bytes, *lines: bytes) -> bytes:
    return call(b"/echo", b"Transfer-Encoding: chunked\r\n", *lines, method=b"POST", body=body)


async def raw(url: str, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send; all that comes back until the server closes."""
    host, port = url.removeprefix("ws://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def statuses(answer: bytes) -> list[int]:
    """Of all answers; ends of bodies stand directly before the next head."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


async def _echo(call: Call) -> None:
    await call.answer(200, await call.body(), "text/plain")


ECHO = Route("POST", "/echo", _echo, "open")


def run(work: Callable[[Server, str], Awaitable[None]], *routes: Route, **settings: Any) -> None:
    """Do it with a server; afterwards that must still serve, with nothing left of what was."""

    async def go() -> None:
        async with served(**settings) as (server, url):
            server.app.add([ECHO, *routes])
            assert server._http is not None
            server._http.config.timeout_keep_alive = 1  # so that answers end soon
            await work(server, url)
            assert statuses(await raw(url, call(b"/health"))) == [200]
            await until(lambda: server.app.calls == 0)

    uvloop.run(go())


# What is sent, and the statuses allowed; () = closed without one.
ODD: dict[str, tuple[bytes, set[int]]] = {
    "absolute form": (call(b"http://elsewhere/health"), {200}),
    "absolute form of a secret": (call(b"http://elsewhere/v1/stream"), {426}),
    "connect": (call(b"elsewhere:80", method=b"CONNECT"), {400, 404, 405}),
    "asterisk": (call(b"*", method=b"OPTIONS"), {404}),
    "trace": (call(b"/health", method=b"TRACE"), {405}),
    "put": (call(b"/health", b"Content-Length: 2\r\n", method=b"PUT", body=b"ab"), {405}),
    "no method": (call(b"/health", method=b"NONSENSE"), {400}),
    "lower-case method": (call(b"/health", method=b"get"), {400}),
    "a GET with a body": (call(b"/health", b"Content-Length: 5\r\n", body=b"hello"), {200}),
    "bad percent encodings": (call(b"/%zz%ff%00%2e%2e/%"), {404}),
    "bytes above 127 in the target": (call(b"/\xff\xfe"), {400, 404}),
    "a zero byte in the target": (call(b"/\x00"), {400}),
    "a control character in a header": (call(b"/health", b"X: a\x01b\r\n"), {200, 400}),
    "up and out": (call(b"/assets/../../etc/passwd"), {404}),
    "up and out, encoded": (call(b"/assets/%2e%2e/%2e%2e/%2e%2e/etc/passwd"), {404}),
    "up and out, twice encoded": (call(b"/assets/%252e%252e/etc/passwd"), {404}),
    "no target": (call(b""), {400}),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", {200, 400}),
    "a strange host": (b"GET /health HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n", {200, 400}),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {200, 400}),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", {200}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "HTTP/3.7": (b"GET /health HTTP/3.7\r\n" + BYE + b"\r\n", {400}),
    "TLS": (bytes.fromhex("16030100c8010000c40303") + b"a" * 200, {400}),
    "bare newlines": (b"GET /health HTTP/1.1\nHost: x\nConnection: close\n\n", {200, 400}),
    "a folded header": (call(b"/health", b"a: b\r\n c\r\n"), {400}),
    "a header without a name": (call(b"/health", b": b\r\n"), {400}),
    "a space in a header's name": (call(b"/health", b"a b: c\r\n"), {400}),
    "10,000 headers": (call(b"/health", b"a:b\r\n" * 10_000), {431}),
    "as many headers as may be": (call(b"/health", b"a:b\r\n" * 250), {200}),
    "a query of 60 KB": (call(b"/health?" + b"a=b&" * 15_000), {200}),
    "a negative length": (post(b"", length=-1), {400}),
    "a length beyond 64 bits": (post(b"", length="9" * 40), {400}),
    "a length that is no number": (post(b"", length="0x10"), {400}),
    "a length too large": (post(b"", length=MAX_BODY + 1), {413}),
    "two lengths": (post(b"ab", b"Content-Length: 1\r\n"), {400}),
    "a length and chunks": (chunked(b"0\r\n\r\n", b"Content-Length: 1\r\n"), {400}),
    "a strange encoding": (call(b"/echo", b"Transfer-Encoding: x\r\n", method=b"POST"), {400}),
    "a chunk that is no number": (chunked(b"zz\r\n\r\n"), {400}),
    "a chunk beyond 64 bits": (chunked(b"f" * 30 + b"\r\n"), {400}),
    "a chunk's extension": (chunked(b"2;a=b\r\nok\r\n0\r\n\r\n"), {200}),
    "a chunk without its end": (chunked(b"2\r\nokay\r\n0\r\n\r\n"), {400}),
    "trailers": (chunked(b"2\r\nok\r\n0\r\na: b\r\n\r\n"), {200}),
    "100-continue": (post(b"ok", b"Expect: 100-continue\r\n"), {100, 200}),
    "another expectation": (post(b"ok", b"Expect: nothing\r\n"), {200, 417}),
    "another upgrade": (
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", {200},
    ),
    "a WebSocket elsewhere": (
        b"GET /other HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        {400, 403, 404},
    ),
    "a WebSocket with a bad key": (
        b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n", {400},
    ),
    "a WebSocket by POST": (
        b"POST /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Content-Length: 5\r\n\r\nhello", {400, 405, 426},
    ),
}  # fmt: skip


def test_odd_requests_are_answered_or_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server, url: str) -> None:
        answers = await asyncio.gather(*(raw(url, sent) for sent, _ in ODD.values()))
        for (name, (_, allowed)), answer in zip(ODD.items(), answers, strict=True):
            found = statuses(answer)
            assert found and set(found) <= allowed, (name, found, answer[:200])
            assert b"0x" not in answer and b"Traceback" not in answer

    run(work)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


MUTATED = [call(b"/health"), post(b"hello"), chunked(b"3\r\nabc\r\n0\r\n\r\n")]
SPICE = [
    b"\x00", b"\r", b"\n", b"\r\n\r\n", b" ", b":", b"\xff", b"%", b"9" * 30, b"HTTP/1.1", b"\x7f",
    b"chunked", b"-1", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
]  # fmt: skip


def mutated(random: random.Random) -> bytes:
    data = bytearray(random.choice(MUTATED))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                data[at : at + random.randint(1, 6)] = b""
            case 1:
                data[at:at] = random.choice(SPICE)
            case 2:
                data[at : at + 1] = bytes([random.randrange(256)])
            case _:
                data[at:at] = data[: random.randrange(len(data) + 1)]
    return bytes(data)


def test_mutated_requests_never_make_an_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server, url: str) -> None:
        host, port = url.removeprefix("ws://").partition("/")[0].split(":")
        chance = random.Random(7)

        async def one(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            writer.write_eof()
            try:
                return await reader.read(1 << 16)
            except ConnectionError:
                return b""
            finally:
                writer.transport.abort()

        seen: dict[int, int] = {}
        for _ in range(40):
            left = {asyncio.create_task(one(mutated(chance))) for _ in range(50)}
            while True:
                # Half a request is waited for: enough once nothing more is answered for a while.
                done, left = await asyncio.wait(left, timeout=0.03)
                for status in (status for task in done for status in statuses(task.result())):
                    seen[status] = seen.get(status, 0) + 1
                if not (done and left):
                    break
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        assert max(seen) < 500 and seen[200] > 50 and seen[400] > 50, seen

    run(work)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_bodies_in_the_smallest_pieces() -> None:
    async def work(server: Server, url: str) -> None:
        small = b"1\r\na\r\n"
        answer = await raw(url, chunked(small * 20_000 + b"0\r\n\r\n"))
        assert answer.endswith(b"a" * 20_000) and statuses(answer) == [200]
        answer = await raw(url, chunked(b""), *[small * 1000] * 200)
        assert statuses(answer) in ([413], [])
        letters = [bytes([c]) for c in post(b"slowly but surely")]
        assert (await raw(url, *letters)).endswith(b"slowly but surely")

    run(work)


def test_a_body_has_a_size_whatever_its_form() -> None:
    async def work(server: Server, url: str) -> None:
        piece = b"100000\r\n" + b"a" * (1 << 20) + b"\r\n"
        answer = await raw(url, chunked(b""), *[piece] * 8, b"0\r\n\r\n")
        assert statuses(answer) == [200] and answer.endswith(b"a" * MAX_BODY)
        answer = await raw(url, chunked(b""), *[piece] * 12)
        assert statuses(answer) in ([413], [])
        assert statuses(await raw(url, post(b"", length=MAX_BODY + 1))) == [413]

    run(work)


def test_bodies_have_a_size_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_COMING", 1 << 20)
    monkeypatch.setattr(http_limits, "LINGER_S", 0.3)

    async def work(server: Server, url: str) -> None:
        host, port = url.removeprefix("ws://").partition("/")[0].split(":")
        slow = []
        for _ in range(3):  # 300 KB each, and then silence
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(post(b"a" * 300_000, length=MAX_BODY))
            slow.append((reader, writer))
        await until(lambda: Call.coming >= 900_000)
        assert Call.coming == 900_000
        assert statuses(await raw(url, post(b"b" * 100_000))) == [200]
        answer = await raw(url, post(b"b" * 400_000, length=MAX_BODY).replace(BYE, HOST))
        assert statuses(answer) == [503] and b"retry-after: 1" in answer
        for _, writer in slow:
            writer.close()
        await until(lambda: Call.coming == 0)
        assert statuses(await raw(url, post(b"b" * 800_000))) == [200]

    run(work)


def test_trailers_have_a_size() -> None:
    async def work(server: Server, url: str) -> None:
        for line in (b"a: b\r\n" * 10_000, b"a: %s\r\n" % (b"b" * 5000) * 20):
            answer = await raw(url, chunked(b"2\r\nok\r\n0\r\n" + line + b"\r\n"))
            assert statuses(answer) in ([431], [200], [])
        assert len(server.app.sessions) == 0

    run(work)


def test_a_body_must_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "BODY_S", 0.3)

    async def work(server: Server, url: str) -> None:
        for begun in (post(b"{", length=100), chunked(b"5\r\nab")):
            assert statuses(await raw(url, begun)) == [408]
            drops = [begun, *[b"a"] * 20]
            assert statuses(await raw(url, *drops, pause=0.05)) in ([408], [])
        # Who was answered before its body was whole is not waited for any longer either.
        begun = call(b"/health", b"Content-Length: 100\r\n", body=b"a").replace(BYE, HOST)
        assert statuses(await raw(url, begun)) == [200]

    run(work)


def test_requests_behind_one_another() -> None:
    async def work(server: Server, url: str) -> None:
        one = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
        assert statuses(await raw(url, one * 8 + call(b"/health"))) == [200] * 9
        both = post(b"first").replace(BYE, HOST) + post(b"second")
        answer = await raw(url, both)
        assert statuses(answer) == [200, 200] and answer.index(b"first") < answer.index(b"second")
        waiting = await raw(url, *[one * 1000] * 20)
        assert len(statuses(waiting)) < 100

    run(work)


def test_who_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "CLOSE_S", 0.3)

    begun = asyncio.Event()

    async def much(call: Call) -> None:
        begun.set()
        await call.answer(200, b"a" * (16 << 20), headers=[(b"connection", b"keep-alive")])

    async def work(server: Server, url: str) -> None:
        assert server._http is not None
        host, port = url.removeprefix("ws://").partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(call(b"/much").replace(BYE, HOST))
        await asyncio.wait_for(begun.wait(), 60)
        await until(lambda: not server._http.server_state.connections)  # type: ignore[union-attr]
        writer.close()

    run(work, Route("GET", "/much", much, "open"))


SECRET = "/srv/models/secret <object at 0x7f00deadbeef> Traceback"


def raises(kind: type[BaseException]) -> Callable[[Call], Awaitable[None]]:
    async def handler(call: Call) -> None:
        raise kind(SECRET)

    return handler


async def _started(call: Call) -> None:
    await call.stream()
    await call.chunk(b"data: one\n\n")
    raise RuntimeError(SECRET)


async def _bad_header(call: Call) -> None:
    await call.say({}, headers=[(b"x", SECRET.encode() + b"\r\n\x00")])


async def _not_json(call: Call) -> None:
    await call.say({"a": object()})


async def _twice(call: Call) -> None:
    await call.say({"a": 1})
    await call.say({"a": SECRET})


KINDS = (
    RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError,
    UnicodeError, RecursionError, MemoryError, NotImplementedError, AssertionError, EOFError,
    StopAsyncIteration, OverflowError, LookupError, OSError, TimeoutError, PermissionError,
)  # fmt: skip
FAILING = [*map(raises, KINDS), _started, _bad_header, _not_json, _twice]


def test_twenty_failures_of_ours_tell_a_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server, url: str) -> None:
        assert len(FAILING) >= 20
        for i in range(len(FAILING)):
            answer = await raw(url, call(b"/fail%d" % i, b"X-Request-Id: id-%d\r\n" % i))
            said = answer.partition(b"\r\n\r\n")[2]
            assert statuses(answer) in ([500], [200], []), answer
            for betrayed in (b"0x", b"/srv", b"/work", b"Traceback", b"secret", b"Error:", b".py"):
                assert betrayed not in answer, answer
            if i < len(KINDS):
                assert statuses(answer) == [500] and b"id-%d" % i in said

    run(work, *(Route("GET", f"/fail{i}", fail, "open") for i, fail in enumerate(FAILING)))
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) >= len(FAILING)  # the operator, though, is told all


def test_pages_of_other_origins() -> None:
    async def work(server: Server, url: str) -> None:
        async def ask(origin: str, method: bytes = b"GET", *lines: bytes) -> tuple[int, str]:
            head = f"Origin: {origin}\r\n".encode()
            answer = await raw(url, call(b"/version", head, *lines, method=method))
            found = re.search(rb"access-control-allow-origin: ([^\r]*)", answer)
            return statuses(answer)[0], found[1].decode() if found else ""

        preflight = (b"Access-Control-Request-Method: POST\r\n",)
        friend, foe = "https://friend.example", "https://foe.example"
        assert await ask(friend) == (200, friend)
        assert await ask(friend, b"OPTIONS", *preflight) == (204, friend)
        assert await ask(friend, b"OPTIONS") == (405, friend)
        for other in (foe, "null", "http://[", friend + ".foe.example", "https://friend.example:1"):
            assert await ask(other) == (403, "")
            assert await ask(other, b"OPTIONS", *preflight) == (405, "")
        # The server's own page: under its address, not under a name that may be made to point here.
        assert await ask("http://localhost") == (200, "")

    run(work, allow_origins=("https://friend.example",))


def test_without_allowed_origins_no_page_may_read_anything() -> None:
    async def work(server: Server, url: str) -> None:
        for path in (b"/health", b"/version", b"/v1/models", b"/nowhere"):
            for method in (b"GET", b"OPTIONS"):
                lines = b"Origin: https://a.example\r\nAccess-Control-Request-Method: GET\r\n"
                answer = await raw(url, call(path, lines, method=method))
                assert b"access-control" not in answer
                assert statuses(answer)[0] in (200, 403, 404, 405)

    run(work)


def test_with_keys_a_page_of_any_origin_needs_one() -> None:
    key = "sk-" + "k" * 30

    async def work(server: Server, url: str) -> None:
        origin = b"Origin: https://a.example\r\n"
        bearer = f"Authorization: Bearer {key}\r\n".encode()
        assert statuses(await raw(url, call(b"/version", origin))) == [401]
        assert statuses(await raw(url, call(b"/version", origin, bearer))) == [200]

    run(work, api_keys=(key,))


def test_an_error_is_in_the_shape_that_clients_read() -> None:
    error = HttpError("rate_limited", "slower", None, 7)
    assert error.status == 429 and (b"retry-after", b"7") in error.headers
    assert error.body()["error"]["code"] == "rate_limited"
