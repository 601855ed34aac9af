"""A constraint sent to an engine in another process is compiled and enforced there."""

from __future__ import annotations

from spec_serve.api import process_messages as p
from spec_serve.spec.request import Finished
from tests.engines import end, finish, ids, request, run
from tests.grammars import SIX, constrained, spelling


def test_what_arrives_is_what_was_asked() -> None:
    eos = tuple(sorted(spelling().eos_ids))
    asked = request([5, 6, 7], 120, constraint=SIX["nested json"], eos=eos)
    (here,) = run(constrained(), asked)
    sent = p.for_engine(p.encode(p.to_submit(1, asked)))
    assert isinstance(sent, p.Submit)
    arrived = p.from_submit(sent, spelling())
    assert arrived.constraint == asked.constraint and arrived.compiled is None
    there = constrained("lookup")
    there.submit(arrived)
    events = finish(there)[arrived.id]
    assert ids(events) == here.tokens
    step = p.for_server(p.encode(p.Step([p.to_told(1, end(events))], 1, None)))
    assert isinstance(step, p.Step)
    told = p.from_told(step.events[0], asked)
    assert isinstance(told, Finished) and told.constraint == here.constraint
    assert here.constraint is not None and here.constraint.complete
