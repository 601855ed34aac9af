"""The WebSocket client for code without an event loop: a thread of its own runs the async one.

Any number of threads may use one SyncClient at once. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from spec_serve.api import messages as m
from spec_serve.client.answers import Answer, GenerationEvent, Messages, gathered
from spec_serve.client.tls import Tls
from spec_serve.client.websocket import CONNECT_S, Client

T = TypeVar("T")


class SyncClient:
    """`with SyncClient(url) as client`; arguments and errors as of `Client`."""

    def __init__(
        self,
        url: str,
        codec: str = m.MSGPACK,
        *,
        api_key: str | None = None,
        tls: Tls | ssl.SSLContext | None = None,
        resume: bool = False,
        connect_s: float = CONNECT_S,
        silence_s: float | None = None,
    ) -> None:
        self._client = Client(
            url, codec, api_key=api_key, tls=tls, resume=resume,
            connect_s=connect_s, silence_s=silence_s,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="spec-serve-client", daemon=True
        )

    @property
    def hello(self) -> m.Hello | None:
        """What the server said first."""
        return self._client.hello

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything; what runs is cancelled by the server."""
        if not self._loop.is_closed():
            try:
                self._run(self._client.close())
            finally:
                self._stop()

    def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        token_ids: list[int] | None = None,
        gen: str = "",
        **options: Any,
    ) -> Generator[GenerationEvent, None, None]:
        """Events of one generation as they come; see `Client.generate`.

        Leaving the loop early, by an exception too, cancels the generation.
        """
        found: queue.SimpleQueue[GenerationEvent | BaseException | None] = queue.SimpleQueue()

        async def read() -> None:
            events = self._client.generate(
                prompt=prompt, messages=messages, token_ids=token_ids, gen=gen, **options
            )
            try:
                async for event in events:
                    found.put(event)
                found.put(None)
            except BaseException as error:
                found.put(error)
                raise
            finally:
                await events.aclose()

        reading = self._begin(read())
        try:
            while (event := found.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            reading.cancel()

    def complete(
        self, prompt: str | None = None, *, token_ids: list[int] | None = None, **options: Any
    ) -> Answer:
        """The whole answer to a prompt, token ids included."""
        options = {"ids": True, **options}
        return gathered(self.generate(prompt=prompt, token_ids=token_ids, **options))

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """The whole answer to a conversation, or to one message."""
        return gathered(self.generate(messages=messages, **{"ids": True, **options}))

    def cancel(self, gen: str) -> None:
        """End a generation; its Finished still comes."""
        self._run(self._client.cancel(gen))

    def ping(self) -> m.Pong:
        """One round trip."""
        return self._run(self._client.ping())

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._begin(work).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
