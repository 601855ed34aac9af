"""Gives up on a gRPC client that does not read: a write to it would wait for as long as it stays.

Knows a call's context and how much waits for it; nothing of what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc

log = logging.getLogger("spec_serve.grpc")

LOOK_S = 0.5


class Patience:
    """Looks, while a call lasts, whether too much waits for its reader; then ends the call.

    overflowing: whether too much waits. give_up: frees what the call holds. Made in the call's
    own task, which is cancelled when patience is at an end.
    """

    def __init__(
        self, context: Any, overflowing: Callable[[], bool], give_up: Callable[[], None]
    ) -> None:
        self._context, self._overflowing, self._give_up = context, overflowing, give_up
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """The call is over."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._overflowing():
            self._ending = asyncio.create_task(self._end())
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    async def _end(self) -> None:
        log.warning("a reader is too slow: its call is ended")
        self._give_up()
        assert self._task is not None
        told = "the reader of this stream is too slow"
        # The status waits behind the write that is stuck; the call's task must not.
        with contextlib.suppress(grpc.aio.AbortError, asyncio.TimeoutError):
            abort = self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told)
            await asyncio.wait_for(abort, LOOK_S)
        self._task.cancel()
