"""Executes one scheduled step on the KV tensors, with the connector's worker half around it.

In: a ``ScheduledStep``. Out: a ``StepReport``. Never: a decision; what it is told to compute, it computes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from orlop.core import OffloadingConnectorMetadata, WorkerOutput
from orlop.engine.batching import ScheduledStep, StepReport, Work
from orlop.engine.model import Batch, Model, Span


class WorkerHalf(Protocol):
    """The calls the engine makes to a connector's worker half, in this order in every step."""

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> None: ...

    def start_load_kv(self, meta: OffloadingConnectorMetadata) -> None: ...

    def wait_for_save(self, meta: OffloadingConnectorMetadata) -> None: ...

    def get_finished(self) -> WorkerOutput: ...

    def shutdown(self) -> None: ...


class Runner:
    """Owns the model, the KV tensors and the last token that each request sampled."""

    def __init__(self, model: Model, num_blocks: int, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.kv_caches = model.new_kv_caches(num_blocks, block_tokens)
        self.connector: WorkerHalf | None = None
        self._last_token: dict[str, int] = {}

    def execute(self, step: ScheduledStep) -> StepReport:
        """Compute the step. Stores of earlier steps are fenced before it, its own are copied after it."""
        for request_id in step.finished_req_ids:
            self._last_token.pop(request_id, None)
        if self.connector is None or step.connector_metadata is None:
            return StepReport(self._compute(step.work))
        meta = step.connector_metadata
        self.connector.handle_preemptions(meta)
        self.connector.start_load_kv(meta)
        sampled = self._compute(step.work)
        self.connector.wait_for_save(meta)
        return StepReport(sampled, self.connector.get_finished())

    def logits_after(self, tokens: list[int]) -> Tensor:
        """Float32 logits (vocabulary,) of the token after ``tokens``, computed alone and from nothing."""
        num_blocks = -(-len(tokens) // self.block_tokens)
        batch = self._batch([(tokens, 0, list(range(num_blocks)), True)])
        return self.model.forward(batch, self.model.new_kv_caches(num_blocks, self.block_tokens))[0]

    def _compute(self, work: list[Work]) -> dict[str, int]:
        """Run the model; the sampled token of each request that samples."""
        if not work:
            return {}
        batch = self._batch([(self._known_tokens(w), w.start, w.block_ids, w.samples) for w in work])
        logits = self.model.forward(batch, self.kv_caches)
        ids = [w.sequence.request_id for w in work if w.samples]
        sampled = dict(zip(ids, logits.argmax(-1).tolist(), strict=True))
        self._last_token |= sampled
        return sampled

    def _known_tokens(self, work: Work) -> list[int]:
        if work.token_ids[-1] >= 0:
            return work.token_ids
        return [*work.token_ids[:-1], self._last_token[work.sequence.request_id]]

    def _batch(self, parts: list[tuple[list[int], int, list[int], bool]]) -> Batch:
        """One batch of ``(tokens, start, block_ids, samples)`` per sequence."""
        tokens: list[int] = []
        positions, write_blocks, spans, sample_rows = [], [], [], []
        for token_ids, start, block_ids, samples in parts:
            first, end = len(tokens), start + len(token_ids)
            tokens += token_ids
            where = torch.arange(start, end)
            blocks = torch.tensor(block_ids[: -(-end // self.block_tokens)])
            positions.append(where)
            write_blocks.append(blocks[where // self.block_tokens])
            spans.append(Span(first, len(tokens), blocks, end))
            if samples:
                sample_rows.append(len(tokens) - 1)
        position = torch.cat(positions)
        return Batch(
            tokens=torch.tensor(tokens),
            positions=position,
            write_blocks=torch.cat(write_blocks),
            write_offsets=position % self.block_tokens,
            spans=tuple(spans),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        )
