"""`compile`: trace, then do all that needs no arguments before the first run.

Passes: constants in a row become one; pieces without arguments get their ids; constraints are
tried, so that what the server refuses is refused now; the constant beginning of the root state is
computed once, which leaves it in the server's prefix cache. Knows no syntax.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import TYPE_CHECKING

from spec_serve.client.answers import ServerError
from spec_serve.lang.backend import Backend
from spec_serve.lang.explain import named
from spec_serve.lang.foresight import questions
from spec_serve.lang.graph import Graph, fingerprint, warm
from spec_serve.lang.held import FORMAT, Held, Known, constant
from spec_serve.lang.parts import Append, Gen, Op, ProgramError, TraceError, every
from spec_serve.lang.scoring import common
from spec_serve.lang.trace import traced

if TYPE_CHECKING:
    from spec_serve.lang.program import Program

# Texts that begin and end in different ways; where prompts with them part, arguments begin.
_PROBES = ("a", " 1\n", "\n\né", ".")


async def compiled(program: Program, backend: Backend, partial: bool) -> Graph:
    """The graph of a program, ready for its arguments. Raises TraceError, ProgramError."""
    tracer, names, result, cut = await traced(program)
    if cut and not partial:
        raise TraceError(cut)
    frozen = list({one.key: one for one in questions(tracer.ops, {})}.values())
    pieces = await asyncio.gather(*(backend.pieces(one) for one in frozen))
    prefix = await _prefix(tracer.ops, backend)
    if getattr(backend, "prepares", True):
        await _try_constraints(tracer.ops, backend, prefix)
        await warm(backend, prefix)
    parameters = [name for name in program.parameters if name not in program.bound]
    signature = inspect.signature(program.fn).parameters
    defaults = {
        name: signature[name].default for name in parameters
        if signature[name].default is not inspect.Parameter.empty
        and constant(signature[name].default)
    }  # fmt: skip
    held = Held(
        version=FORMAT,
        name=program.name,
        parameters=parameters,
        defaults=defaults,
        ops=tracer.ops,
        names=names,
        result=result,
        known=[Known(one.key, ids) for one, ids in zip(frozen, pieces, strict=True)],
        prefix=prefix,
        fingerprint=await fingerprint(backend),
        cut=cut,
    )
    return Graph(held, tracer.functions, tracer.types, program)


async def _prefix(ops: list[Op], backend: Backend) -> list[int]:
    """Ids all runs' first prompts begin with."""
    first = [found[0] for probe in _PROBES if (found := questions(ops, {}, probe))]
    if not first:
        return []
    begun = [pieces[0] for pieces in await asyncio.gather(*map(backend.pieces, first))]
    return begun[0][: common(begun)]


async def _try_constraints(ops: list[Op], backend: Backend, prefix: list[int]) -> None:
    """Have the server compile each constraint. Raises ProgramError with the line."""
    tried: set[str] = set()
    for op in every(ops):
        if not isinstance(op, Append):
            continue
        for item in op.items:
            if not isinstance(item, Gen) or "constraint" not in item.options:
                continue
            wanted = item.options["constraint"]
            if (text := json.dumps(wanted, sort_keys=True)) in tried:
                continue
            tried.add(text)
            try:
                options = {"constraint": wanted, "max_tokens": 1}
                async for _ in backend.generate(prefix or [0], options):
                    pass
            except (ServerError, ValueError) as error:
                raise ProgramError(f"{op.where}: {named(item.key)}: {error}") from error
