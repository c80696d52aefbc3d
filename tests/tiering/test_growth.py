"""Host memory that becomes ready bit by bit: what is ready is used, and once all of it is, nobody asks any more.

In: a manager whose slots are made ready by hand. Out: how many slots it hands out, and how often it has asked. Never: a
real region, a thread.
"""

from __future__ import annotations

from orlop.core import KeyRun
from orlop.testing.rig import Rig, make_tiered_rig
from orlop.tiering.manager import TieringManager

SLOTS = 16


class Faulting:
    """Slots that are ready for use; counts how often it is asked."""

    def __init__(self, ready: int) -> None:
        self.ready = ready
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return self.ready


def make(ready: int) -> tuple[Rig, TieringManager, Faulting]:
    faulting = Faulting(ready)
    rig = make_tiered_rig(slots=SLOTS, usable=ready, tiers=0, tiering={"usable_slots": faulting})
    assert isinstance(rig.manager.inner, TieringManager)
    return rig, rig.manager.inner, faulting


def test_slots_are_used_from_the_step_on_in_which_they_are_ready() -> None:
    rig, manager, faulting = make(2)
    for ready in (2, 3, 3, SLOTS - 1, SLOTS):
        faulting.ready = ready
        rig.runner.step()
        assert manager.host.usable == ready
    request = rig.store(range(4 * SLOTS))
    assert manager.host.ready_prefix(KeyRun(0, request.block_hashes, 0, SLOTS)) == SLOTS
    rig.finish()


def test_nobody_asks_once_all_slots_are_ready() -> None:
    rig, manager, faulting = make(2)
    for _ in range(3):
        rig.runner.step()
    assert faulting.asked == 3, "once per step"
    faulting.ready = SLOTS
    rig.runner.step()
    asked = faulting.asked
    rig.store(range(40))
    assert manager.host.usable == SLOTS
    assert faulting.asked == asked
    rig.finish()


def test_nobody_asks_where_all_slots_are_ready_from_the_start() -> None:
    rig, _, faulting = make(SLOTS)
    rig.store(range(40))
    assert faulting.asked == 0
    rig.finish()
