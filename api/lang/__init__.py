"""Programs: plain Python that writes into a state, where the model goes on and chooses.

`@program`, `system`/`user`/`assistant`, `gen`, `select`, forks and calls; see docs/programs.md. A
state is token ids: what the model wrote is never encoded anew, and no text becomes control tokens.
Imports no torch.
"""

from __future__ import annotations

from spec_serve.lang.backend import Backend, ClientBackend
from spec_serve.lang.events import Called, Delta, Done, Ended, Event, Meta
from spec_serve.lang.graph import Graph
from spec_serve.lang.openai import OpenAIBackend, OpenAIWarning
from spec_serve.lang.parts import (
    ProgramError,
    TraceError,
    assistant,
    gen,
    select,
    system,
    user,
)
from spec_serve.lang.program import Const, On, Program, Result, parallel, program
from spec_serve.lang.remote import run_registered
from spec_serve.lang.state import Branches, State, Value
from spec_serve.lang.values import ValueParseError

__all__ = [
    "Backend",
    "Branches",
    "Called",
    "ClientBackend",
    "Const",
    "Delta",
    "Done",
    "Ended",
    "Event",
    "Graph",
    "Meta",
    "On",
    "OpenAIBackend",
    "OpenAIWarning",
    "Program",
    "ProgramError",
    "Result",
    "State",
    "TraceError",
    "Value",
    "ValueParseError",
    "assistant",
    "gen",
    "parallel",
    "program",
    "run_registered",
    "select",
    "system",
    "user",
]
