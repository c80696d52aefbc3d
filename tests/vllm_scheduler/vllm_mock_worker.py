"""A worker and a device without a model: every KV cell says which token prefix it stands for.

In: vLLM's scheduler outputs with our step messages. Out: vLLM's model runner outputs with our reports, late and
failed as the caller's dice say. Never: mercy; a stale cell, a wrong load or a broken fence is an AssertionError
at the step in which it happens.

The model is a pure function: the cell of position ``p`` is a fingerprint of tokens ``0 .. p`` (and of the KV
group), and the next token follows from the last fingerprint. So one can say at any moment what every cell
must hold, and what every request must answer, whoever computed, stored or loaded it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.outputs import ModelRunnerOutput
from vllm_adapter import BLOCK_TOKENS, VOCABULARY, WINDOW_TOKENS, KVConnectorOutput

from orlop.core import GroupTransfer, Int64Array, JobReport, OffloadingConnectorMetadata, TransferJob, TransferKind
from orlop.vllm.translate import Reports

PRIME = (1 << 61) - 1
BASE = 1_000_003
GARBAGE = -1


class Prefix:
    """A token sequence with the fingerprint of every prefix of it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._marks: list[int] = []
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        mark = self._marks[-1] if self._marks else 1
        for token in tokens:
            mark = (mark * BASE + token + 1) % PRIME
            self.tokens.append(token)
            self._marks.append(mark)

    def cells(self, group: int, start: int, stop: int) -> Int64Array:
        """What ``group`` holds for positions ``start .. stop - 1``."""
        return np.array(self._marks[start:stop], dtype=np.int64) ^ group

    def next_token(self) -> int:
        """The token that the model says after the whole sequence."""
        return (self._marks[-1] >> 7) % VOCABULARY


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers to ``prompt`` when nothing is cached anywhere."""
    text = Prefix(prompt)
    for _ in range(count):
        text.extend((text.next_token(),))
    return text.tokens[len(prompt) :]


@dataclass
class Dice:
    """How often things happen per step and transfer; all chances in 0 .. 1."""

    run_transfer: float = 0.2
    report: float = 0.7
    fail_store: float = 0.05
    fail_load: float = 0.08
    report_twice: float = 0.05
    lose_track_for_long: float = 0.01
    """A report that comes after its job's deadline."""


@dataclass
class Row:
    """The worker's idea of one running request: its text and its block table."""

    text: Prefix
    tables: list[list[int]]


@dataclass
class Transfer:
    """One job on its way: ``done`` once its bytes have moved (or its failure is certain)."""

    job: TransferJob
    epoch: int
    silent: set[int]
    """Ranks that have not reported it."""
    not_before_step: int = 0
    done: bool = False
    ok: bool = True
    outdated: bool = False


@dataclass
class Sightings:
    """What happened, so that a test can ask whether it has tested anything."""

    counts: Counter[str] = field(default_factory=Counter)

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def add(self, name: str, count: int = 1) -> None:
        self.counts[name] += count


class MockWorker:
    """Computes, stores and loads over arrays of cells, for all ranks at once; each rank reports for itself.

    ``windows[g]`` is group ``g``'s sliding window in tokens or None. ``slots`` host slots hold one chunk each.
    """

    def __init__(
        self,
        *,
        blocks: int,
        slots: int,
        blocks_per_chunk: int,
        windows: Sequence[int | None],
        ranks: int,
        rng: random.Random,
        dice: Dice,
    ) -> None:
        self.windows = windows
        self.ranks = ranks
        self.rng = rng
        self.dice = dice
        self.seen = Sightings()
        self.device = np.full((blocks, BLOCK_TOKENS), GARBAGE, dtype=np.int64)
        self.device_epoch = np.zeros((blocks, BLOCK_TOKENS), dtype=np.int64)
        """Per cell the epoch of the oldest KV that it was computed from."""
        self.host = np.full((slots, blocks_per_chunk, BLOCK_TOKENS), GARBAGE, dtype=np.int64)
        self.host_epoch = np.full(self.host.shape, -1, dtype=np.int64)
        self.slot_key: dict[int, tuple[int, bytes]] = {}
        """Key that each slot was last reserved for, as told by the watched manager."""
        self.known: dict[bytes, tuple[Prefix, int]] = {}
        """Engine hash -> text and the position at which it ends."""
        self.epoch = 0
        """Number of resets so far."""
        self.valid_from = 0
        """Cells of an earlier epoch must not be read any more."""
        self.step = 0
        self.rows: dict[str, Row] = {}
        self.transfers: dict[int, Transfer] = {}
        self.told: list[JobReport] = []

    # --- what the walk tells us ----------------------------------------------------------------

    def learn_hashes(self, text: Prefix, hashes: Sequence[bytes], known: int) -> int:
        """Remember what the hashes from index ``known`` on stand for; the new count."""
        for i in range(known, len(hashes)):
            self.known.setdefault(hashes[i], (text, (i + 1) * BLOCK_TOKENS))
        return len(hashes)

    def begin_epoch(self, *, all_void: bool) -> None:
        """The caches were reset; ``all_void``: the device's too, and no request keeps a block."""
        self.epoch += 1
        if all_void:
            self.valid_from = self.epoch

    # --- one step --------------------------------------------------------------------------------

    def execute(self, output: Any, meta: OffloadingConnectorMetadata) -> ModelRunnerOutput:
        """Run one scheduler output: fences, forward, transfers; the sampled tokens, without a KV output."""
        self.step += 1
        for req_id in output.finished_req_ids:  # first: the id may be back already
            self.rows.pop(req_id, None)
        self._accept(job for job in meta.store_jobs if not job.after_compute)
        self._flush(meta.jobs_to_flush, {job.job_id for job in meta.store_jobs if job.after_compute})
        for job_id in meta.loads_to_fail:
            self._outdate(job_id)
        self._run_some()
        sampled = self._forward(output)
        self._accept(job for job in meta.store_jobs if job.after_compute)
        self._accept(meta.load_jobs)
        self._run_some()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=[sampled[req_id] for req_id in ids],
        )

    def _accept(self, jobs: Iterable[TransferJob]) -> None:
        for job in jobs:
            assert job.job_id not in self.transfers, f"job {job.job_id} was sent twice"
            self.transfers[job.job_id] = Transfer(job, self.epoch, set(range(self.ranks)))
            self.seen.add(f"{job.kind}s")
            self.seen.add("doomed", job.doomed)

    def _run_some(self) -> None:
        """Before and after the forward: whatever has been submitted may move."""
        for transfer in self.transfers.values():
            if not transfer.done and self.rng.random() < self.dice.run_transfer:
                self._run(transfer)

    def _flush(self, job_ids: Iterable[int], coming: set[int]) -> None:
        for job_id in job_ids:
            assert job_id not in coming, f"job {job_id}: to be read before the step that computes it"
            transfer = self.transfers.get(job_id)
            if transfer is not None and not transfer.done:
                assert transfer.job.kind is TransferKind.STORE
                self._run(transfer)
                self.seen.add("flushed")

    def _outdate(self, job_id: int) -> None:
        transfer = self.transfers.get(job_id)
        if transfer is not None:
            assert transfer.job.kind is TransferKind.LOAD
            transfer.outdated, transfer.ok = True, False  # whoever has not reported says so
            self.seen.add("outdated_loads")

    # --- forward ------------------------------------------------------------------------------------

    def _forward(self, output: Any) -> dict[str, list[int]]:
        self._take_rows(output)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            req_id: self._compute(req_id, starts[req_id], count)
            for req_id, count in output.num_scheduled_tokens.items()
        }

    def _take_rows(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self.rows[new.req_id] = Row(Prefix(tokens), [list(ids) for ids in new.block_ids])
        cached = output.scheduled_cached_reqs
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self.rows[req_id] = Row(Prefix(cached.all_token_ids[req_id]), [list(x) for x in ids])
            elif ids is not None:
                for table, more in zip(self.rows[req_id].tables, ids, strict=True):
                    table.extend(more)

    def _compute(self, req_id: str, start: int, count: int) -> list[int]:
        """Check all cells that attention reads, write the new ones; the sampled token, if any."""
        row = self.rows[req_id]
        stop = start + count
        assert stop <= len(row.text), f"{req_id}: {stop} tokens scheduled, {len(row.text)} known"
        oldest = min(self.check_cells(req_id, row.text, g, table, start) for g, table in enumerate(row.tables))
        for group, table in enumerate(row.tables):
            self._write(req_id, row.text, group, table, start, stop, oldest)
        if stop < len(row.text):
            return []
        token = row.text.next_token()
        row.text.extend((token,))
        return [token]

    def check_cells(self, req_id: str, text: Prefix, group: int, table: Sequence[int], computed: int) -> int:
        """Every cell that the token at ``computed`` would read holds what its prefix stands for; their oldest epoch."""
        window = self.windows[group]
        first = 0 if window is None else max(0, computed - window + 1)
        lo, hi = first // BLOCK_TOKENS, -(-computed // BLOCK_TOKENS)
        blocks = table[lo:hi]
        assert len(blocks) == hi - lo, f"{req_id}: table of {len(table)} blocks for {computed} computed tokens"
        assert 0 not in blocks, f"{req_id}: group {group} reads the null block below {computed}"
        found = self.device[blocks].reshape(-1)[first - lo * BLOCK_TOKENS : computed - lo * BLOCK_TOKENS]
        expected = text.cells(group, first, computed)
        if not np.array_equal(found, expected):
            at = first + int(np.argmax(found != expected))
            raise AssertionError(
                f"step {self.step}, {req_id}: group {group}, position {at} of {computed} computed: block "
                f"{table[at // BLOCK_TOKENS]} holds something else"
            )
        epochs = self.device_epoch[blocks].reshape(-1)[first - lo * BLOCK_TOKENS : computed - lo * BLOCK_TOKENS]
        oldest = int(epochs.min(initial=self.epoch))
        assert oldest >= self.valid_from, f"step {self.step}, {req_id}: KV from before a reset was served"
        return oldest

    def _write(
        self, req_id: str, text: Prefix, group: int, table: Sequence[int], start: int, stop: int, epoch: int
    ) -> None:
        positions = np.arange(start, stop)
        blocks = np.asarray(table, dtype=np.int64)[positions // BLOCK_TOKENS]
        assert (blocks != 0).all(), f"{req_id}: group {group} writes the null block in {start} .. {stop}"
        self.device[blocks, positions % BLOCK_TOKENS] = text.cells(group, start, stop)
        self.device_epoch[blocks, positions % BLOCK_TOKENS] = epoch

    # --- transfers ----------------------------------------------------------------------------------------

    def _run(self, transfer: Transfer) -> None:
        """Move the bytes of one job, or fail it; marks it done."""
        store = transfer.job.kind is TransferKind.STORE
        fails = self.rng.random() < (self.dice.fail_store if store else self.dice.fail_load)
        transfer.done, transfer.ok = True, not (fails or transfer.job.doomed or transfer.outdated)
        for part in transfer.job.transfers:
            if store:
                self._copy_out(transfer, part, fails)
            else:
                self._copy_in(transfer, part, fails)
        self.seen.add(f"failed_{transfer.job.kind}s", not transfer.ok)

    def _copy_out(self, transfer: Transfer, part: GroupTransfer, fails: bool) -> None:
        assert 0 not in part.block_ids, f"job {transfer.job.job_id} stores the null block"
        if fails:
            self.host[part.slots] = GARBAGE
            return
        for block, slot, offset in zip(part.block_ids, part.slots, part.offsets, strict=True):
            expected = self._expected(int(slot), int(offset), part.group)
            assert np.array_equal(self.device[block], expected), (
                f"step {self.step}: store job {transfer.job.job_id} of {transfer.job.req_id} reads block {block} of "
                f"group {part.group}, which does not hold what its key stands for (any more)"
            )
            self.host[slot, offset] = self.device[block]
            self.host_epoch[slot, offset] = self.device_epoch[block]
            assert (self.device_epoch[block] >= transfer.epoch).all(), (
                f"step {self.step}: {transfer.job.req_id} stores KV that comes from before the reset"
            )

    def _copy_in(self, transfer: Transfer, part: GroupTransfer, fails: bool) -> None:
        assert 0 not in part.block_ids, f"job {transfer.job.job_id} loads into the null block"
        if fails:
            self.device[part.block_ids] = GARBAGE
            return
        for block, slot, offset in zip(part.block_ids, part.slots, part.offsets, strict=True):
            if transfer.ok:
                expected = self._expected(int(slot), int(offset), part.group)
                assert np.array_equal(self.host[slot, offset], expected), (
                    f"step {self.step}: load job {transfer.job.job_id} of {transfer.job.req_id} reads slot {slot}, "
                    f"which does not hold what its key stands for"
                )
                assert (self.host_epoch[slot, offset] >= transfer.epoch).all(), (
                    f"step {self.step}: load job {transfer.job.job_id} serves what was stored before a reset"
                )
            self.device[block] = self.host[slot, offset]
            self.device_epoch[block] = self.host_epoch[slot, offset]

    def _expected(self, slot: int, offset: int, group: int) -> Int64Array:
        key_group, block_hash = self.slot_key[slot]
        assert key_group == group, f"slot {slot} belongs to group {key_group}, the job says {group}"
        text, end = self.known[block_hash]
        start = end - (self.host.shape[1] - offset) * BLOCK_TOKENS
        return text.cells(group, start, start + BLOCK_TOKENS)

    def slots_in_use(self) -> Mapping[int, TransferJob]:
        """Slots of jobs that have not been reported."""
        return {int(s): t.job for t in self.transfers.values() for part in t.job.transfers for s in part.slots}

    # --- reports ------------------------------------------------------------------------------------------

    def reports(self) -> KVConnectorOutput | None:
        """What is said after this step; None (as vLLM has it in-process) where there is nothing to say."""
        said: list[JobReport] = []
        received, failed = set(), set()
        for transfer in [t for t in self.transfers.values() if t.done]:
            said += self._report(transfer)
            if not transfer.silent:
                del self.transfers[transfer.job.job_id]
                if transfer.job.kind is TransferKind.LOAD:
                    received.add(transfer.job.req_id)
                    failed.update(() if transfer.ok else (transfer.job.req_id,))
        if self.told and self.rng.random() < self.dice.report_twice:
            said.append(self.rng.choice(self.told))
            self.seen.add("repeated_reports")
        self.told = (self.told + said)[-20:]
        if not said:
            return None
        return KVConnectorOutput(
            finished_recving=received, failed_recving=failed, kv_connector_worker_meta=Reports(tuple(said))
        )

    def _report(self, transfer: Transfer) -> list[JobReport]:
        """What the ranks say of one job in this step; a failure is the last one's."""
        said: list[JobReport] = []
        for rank in sorted(transfer.silent):
            if self.step < transfer.not_before_step or self.rng.random() >= self.dice.report:
                continue
            if transfer.job.kind is TransferKind.STORE and self.rng.random() < self.dice.lose_track_for_long:
                transfer.not_before_step = self.step + 60
                self.seen.add("late_stores")
                continue
            transfer.silent.discard(rank)
            said.append(JobReport(transfer.job.job_id, rank, transfer.ok or bool(transfer.silent)))
        return said


def windows_of(windowed: bool) -> list[int | None]:
    """The sliding windows of the groups, in group order."""
    return [None, WINDOW_TOKENS] if windowed else [None]
