"""The real manager under watch.

In: what the scheduler half calls it with. Out: the same answers; the mock worker learns what each slot stands for; an
AssertionError where the half calls for a life that has ended, or a slot is given away that a job may still touch.
Never: another answer than the manager's own.
"""

from __future__ import annotations

from vllm_mock_worker import MockWorker

from orlop.core import FIRST_GENERATION, JointOffer, KeyRun, Namespace, PrefixAnswer, ReqContext, Reservation, StorePlan
from orlop.host.tier import HostTier
from orlop.tiering.manager import TieringManager, TieringOptions


def _namespace(generation: bytes) -> Namespace:
    return Namespace(generation, generation)


def make_manager(slots: int, kind: type[TieringManager] = TieringManager) -> TieringManager:
    """A TieringManager over a host tier of ``slots`` slots, without secondary tiers, for up to two KV groups."""
    return kind(HostTier(slots), [], _namespace, FIRST_GENERATION, TieringOptions(payload_bytes=(4096, 4096)))


class WatchedManager(TieringManager):
    """Call ``watch`` before anything else."""

    worker: MockWorker
    lives: set[int]
    ended: set[int]

    def watch(self, worker: MockWorker) -> None:
        self.worker, self.lives, self.ended = worker, set(), set()

    def _must_live(self, context: ReqContext) -> None:
        assert context.life in self.lives, f"life {context.life}: called before on_new_request"
        assert context.life not in self.ended, f"life {context.life}: called after on_request_finished"

    def on_new_request(self, context: ReqContext) -> None:
        assert context.life not in self.lives, f"life {context.life} began twice"
        self.lives.add(context.life)
        super().on_new_request(context)

    def on_request_finished(self, context: ReqContext) -> None:
        self._must_live(context)
        self.ended.add(context.life)
        super().on_request_finished(context)

    def lookup_prefix(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> PrefixAnswer:
        self._must_live(context)
        return super().lookup_prefix(run, context, now=now, since=since)

    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        self._must_live(context)
        reservation = super().prepare_load(run, context, now=now)
        for slot, block_hash in zip(reservation.slots.tolist(), reservation.hashes, strict=True):
            assert self.worker.slot_key[slot] == (run.group, block_hash), f"slot {slot} is not that chunk's"
        return reservation

    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        self._must_live(context)
        plan = super().prepare_store(run, context, now=now)
        self._watch(plan.reservation)
        return plan

    def prepare_joint_store(self, offer: JointOffer, *, now: float) -> Reservation | None:
        for context in offer.contexts:
            self._must_live(context)
        reservation = super().prepare_joint_store(offer, now=now)
        self._watch(reservation)
        if reservation is not None:
            lives = {context.life for context in reservation.contexts}
            self.worker.seen.add("shared_runs", 1 < len(lives) < len(reservation.contexts))
        return reservation

    def _watch(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            in_use = self.worker.slots_in_use()
            for slot, block_hash in zip(reservation.slots.tolist(), reservation.hashes, strict=True):
                assert slot not in in_use, f"slot {slot} is reserved while job {in_use[slot].job_id} may touch it"
                self.worker.slot_key[slot] = (reservation.group, block_hash)
