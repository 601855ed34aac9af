"""A call of a function outside: within its time, as often as it may be tried.

Knows no states and no server.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from spec_serve.lang.parts import Call


async def called(op: Call, fn: Callable[..., Any], args: list[Any]) -> Any:
    """What the function returns; a plain one gets a thread. Raises what its last attempt raises."""
    for left in range(op.retries, -1, -1):
        try:
            async with asyncio.timeout(op.timeout):
                if inspect.iscoroutinefunction(fn):
                    return await fn(*args)
                value = await asyncio.to_thread(fn, *args)
                return await value if inspect.isawaitable(value) else value
        except Exception:
            if not left:
                raise
    raise AssertionError("a range that counts down to 0 is not empty")
