"""Executes one scheduled step on the KV tensors, with the connector's worker half around it.

In: a ``ScheduledStep``. Out: a ``StepReport``. Never: a decision; what it is told to compute, it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from orlop.core import OffloadingConnectorMetadata, WorkerOutput
from orlop.engine.attention import AttentionPlan, Part
from orlop.engine.batching import ScheduledStep, StepReport, Work
from orlop.engine.model import Batch, Model
from orlop.engine.sampling import sample


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
        self.windows = tuple(model.config.layer_groups)
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
        groups = range(len(self.model.config.layer_groups))
        tables = [range(group * num_blocks, (group + 1) * num_blocks) for group in groups]
        batch = self._batch([(tokens, 0, tables)], [len(tokens) - 1])
        return self.model.forward(batch, self.model.new_kv_caches(num_blocks * len(groups), self.block_tokens))[0]

    def _compute(self, work: list[Work]) -> dict[str, int]:
        """Run the model; the sampled token of each request that samples."""
        if not work:
            return {}
        parts, sample_rows, rows = [], [], 0
        for one in work:
            parts.append((self._known_tokens(one), one.start, one.block_ids))
            rows += len(one.token_ids)
            if one.samples:
                sample_rows.append(rows - 1)
        logits = self.model.forward(self._batch(parts, sample_rows), self.kv_caches)
        sampled = self._sample([one for one in work if one.samples], logits)
        self._last_token |= sampled
        return sampled

    def _sample(self, work: list[Work], logits: Tensor) -> dict[str, int]:
        tokens: list[int] = logits.argmax(-1).tolist()
        for row, one in enumerate(work):
            seq = one.sequence
            if seq.params.temperature > 0:
                tokens[row] = sample(logits[row], seq.params, seq.seed, one.start + len(one.token_ids))
        return {one.sequence.request_id: token for one, token in zip(work, tokens, strict=True)}

    def _known_tokens(self, work: Work) -> list[int]:
        if work.token_ids[-1] >= 0:
            return work.token_ids
        return [*work.token_ids[:-1], self._last_token[work.sequence.request_id]]

    def _batch(self, parts: Sequence[tuple[list[int], int, Sequence[Sequence[int]]]], sample_rows: list[int]) -> Batch:
        """One batch of ``(tokens, first position, block tables)`` per sequence."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[list[Part]] = [[] for _ in self.windows]
        for token_ids, start, tables in parts:
            for span, table in zip(spans, tables, strict=True):
                span.append(Part(len(tokens), start, len(token_ids), table))
            tokens += token_ids
            positions += range(start, start + len(token_ids))
        return Batch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            plans=[AttentionPlan(s, self.block_tokens, w) for s, w in zip(spans, self.windows, strict=True)],
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        )
