"""The free slots, as a stack.

Knows slot numbers 1..n and which of them are free; slot 0 (TRASH) is never handed out. Does not
know who holds the others, nor what they contain (cache/store.py does).
"""

from __future__ import annotations

from collections.abc import Sequence


class FreeSlots:
    """A stack of free slots out of 1..`slots`; all are free at first.

    Slots given back together are handed out again lowest first, so that a row's slots tend to lie
    next to one another. Giving back a slot that is free, or no slot of ours, is a bug and asserts.
    """

    __slots__ = ("_free", "_stack", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._stack = list(range(slots, 0, -1))
        self._free = bytearray(b"\x01") * (slots + 1)
        self._free[0] = 0

    def __len__(self) -> int:
        return len(self._stack)

    def take(self, count: int) -> list[int]:
        """The top `count` slots; the caller has made sure that there are as many."""
        stack, free = self._stack, self._free
        if count == 1:
            slot = stack.pop()
            free[slot] = 0
            return [slot]
        assert 0 <= count <= len(stack), f"{count} slots wanted, {len(stack)} are free"
        keep = len(stack) - count
        taken = stack[keep:]
        del stack[keep:]
        taken.reverse()
        for slot in taken:
            free[slot] = 0
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Take `slots` back."""
        free, last = self._free, self.slots
        for slot in slots:
            assert 0 < slot <= last, f"slot {slot} is foreign: ours are 1..{last}"
            assert not free[slot], f"slot {slot} is free already"
            free[slot] = 1
        self._stack += sorted(slots, reverse=True)

    def free(self) -> list[int]:
        """The free slots, next to be handed out last."""
        return self._stack.copy()

    def check(self) -> None:
        """Assert that the stack holds each free slot exactly once."""
        marked = {slot for slot in range(self.slots + 1) if self._free[slot]}
        assert len(self._stack) == len(marked), "a slot lies twice on the free stack, or is lost"
        assert marked == set(self._stack), "free stack and free marks differ"
        assert 0 not in marked, "slot 0 is TRASH and never free"
