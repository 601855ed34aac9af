"""What a run will ask to have tokenised, as far as constants and arguments tell.

A walk over the operations as a run would do them, without a server: where a value is not known,
what follows it is left out, or guessed. Knows no ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spec_serve.lang import healing
from spec_serve.lang.conversation import Conversation, Question
from spec_serve.lang.parts import Append, Call, Const, Fork, Gen, Op, Select, bodies
from spec_serve.lang.values import written

States = dict[int, Conversation | None]  # None: unknown from here on


def questions(
    ops: Iterable[Op], given: Mapping[str, Any], otherwise: str | None = None
) -> list[Question]:
    """Questions in the order in which a run has them.

    otherwise: text in place of every value that is not known; None = what follows it is left out.
    It is assumed that stop strings begin with a token; where not, a run asks once more.
    """
    walk = _Walk(given, otherwise)
    walk.through(ops, {0: Conversation()})
    return walk.found


class _Walk:
    def __init__(self, given: Mapping[str, Any], otherwise: str | None) -> None:
        self._given, self._otherwise = given, otherwise
        self.found: list[Question] = []

    def through(self, ops: Iterable[Op], states: States) -> None:
        """All of them; states are as the operations find and leave them."""
        for op in ops:
            if isinstance(op, Call):
                continue
            held = states[op.parent if isinstance(op, Fork) else op.state]
            if isinstance(op, Fork):
                for child in op.children:
                    states[child] = None if held is None else held.copy()
            elif held is None:
                continue
            elif isinstance(op, Append):
                states[op.state] = self._append(held, op)
            else:  # which case, how often: only a run knows; how each begins is known
                for body in bodies(op):
                    self.through(body.ops, {op.state: held.copy()})
                states[op.state] = None

    def _append(self, held: Conversation, op: Append) -> Conversation | None:
        held.open(op.role)
        for item in op.items:
            if isinstance(item, Const):
                held.add(item.text)
            elif isinstance(item, Gen):
                self.found += healing.questions(held) if item.heal else [held.question()]
                held.fill([], "", [])
            elif isinstance(item, Select):
                self.found += [held.question(choice) for choice in item.choices]
                if self._otherwise is None:
                    return None
                held.add(item.choices[0])
            else:
                name = item.key.removeprefix("arg:")
                if item.key.startswith("arg:") and name in self._given:
                    held.add(written(self._given[name]))
                elif self._otherwise is None:
                    return None
                else:
                    held.add(self._otherwise)
        held.close(op.role)
        return held
