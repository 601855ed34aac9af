"""The free stack: every slot once, low ones first, and double frees found at once."""

import pytest

from spec_serve.cache.slots import FreeSlots


def test_hands_out_every_slot_but_trash() -> None:
    free = FreeSlots(7)
    assert free.take(3) == [1, 2, 3]
    assert free.take(1) == [4]
    assert free.take(0) == []
    assert free.take(3) == [5, 6, 7]
    assert len(free) == 0
    free.check()


def test_slots_given_back_come_out_ascending() -> None:
    free = FreeSlots(10)
    free.take(10)
    free.give([9, 3, 4, 8, 5])
    assert free.take(5) == [3, 4, 5, 8, 9]
    free.check()


def test_last_given_first_taken() -> None:
    free = FreeSlots(10)
    free.take(6)
    free.give([2])
    free.give([5])
    assert free.take(3) == [5, 2, 7]


@pytest.mark.parametrize("slot", [0, -1, 6])
def test_foreign_slot_asserts(slot: int) -> None:
    free = FreeSlots(5)
    free.take(5)
    with pytest.raises(AssertionError, match="foreign"):
        free.give([slot])


def test_double_free_asserts() -> None:
    free = FreeSlots(5)
    free.take(2)
    with pytest.raises(AssertionError, match="free already"):
        free.give([3])
    with pytest.raises(AssertionError, match="slot 1 is free already"):
        free.give([1, 1])


def test_taking_too_many_asserts() -> None:
    free = FreeSlots(3)
    with pytest.raises(AssertionError, match="4 slots wanted, 3 are free"):
        free.take(4)


def test_check_finds_a_slot_twice_on_the_stack() -> None:
    free = FreeSlots(3)
    free._stack.append(2)
    with pytest.raises(AssertionError):
        free.check()
