"""A client of a service in the same process: no socket, the messages of one.

For programs beside the engine, and for whoever has a Service and wants the client's methods. Knows
sessions and the client; nothing is encoded on the way.
"""

from __future__ import annotations

import asyncio
from collections import deque

from spec_serve.api import messages as m
from spec_serve.api.auth import LOCAL, Principal
from spec_serve.api.service import Service
from spec_serve.api.session import Session
from spec_serve.client import Client, ConnectionLost
from spec_serve.client.wires import greeting


class _Wire:
    """A session as the client sees a connection."""

    def __init__(self, service: Service, principal: Principal) -> None:
        self._said = asyncio.Event()
        self._held: deque[m.Server] = deque()
        self._over: int | None = None
        self._session = Session(service, principal, self._said.set, self._end)
        self._session.greet()

    async def send(self, message: m.Client) -> None:
        """Say something."""
        if self._over is not None:
            raise ConnectionLost(self._over)
        self._session.receive(message)

    async def receive(self) -> m.Server:
        """What is said next."""
        while not self._held:
            if self._over is not None:
                raise ConnectionLost(self._over)
            await self._said.wait()
            self._said.clear()
            self._held.extend(self._session.take())
        return self._held.popleft()

    async def close(self, code: int = 1000) -> None:
        """What runs is cancelled."""
        self._end(code)

    def abort(self) -> None:
        """The same."""
        self._end(1006)

    def _end(self, code: int) -> None:
        if self._over is None:
            self._over = code
            self._session.drop(resumable=False)
            self._said.set()


class InProcessClient(Client):
    """`async with InProcessClient(service) as client`, on the service's loop; else as Client."""

    def __init__(
        self, service: Service, principal: Principal = LOCAL, *, silence_s: float | None = None
    ) -> None:
        super().__init__("ws://in-process", silence_s=silence_s)
        self._service, self._principal = service, principal

    async def _connect(self) -> None:
        wire = _Wire(self._service, self._principal)
        self.hello = await greeting(wire, self._connect_s)
        self._wire, self._up, self._lost = wire, True, None
