"""A connector double that keeps pages in a dictionary, and the plain twin that judges tokens.

In: the engine's calls. Out: loads that end when the test says so. Never: Orlop's own connector.

It knows the block table of a request only from the step's scheduler output, as a real connector does, and it
fills the blocks of a load with NaN at once: whoever computes with them before the load is reported, or hands
them out, produces NaN logits or wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from orlop.core import WorkerOutput
from orlop.engine.llm import LLM, EngineConfig


@dataclass
class Meta:
    loads: list = field(default_factory=list)
    stores: list = field(default_factory=list)


class DictConnector:
    """Both halves in one object. ``pages`` maps a block hash to its pages, one per layer."""

    def __init__(self, pages=None, *, load_steps=1, hold_loads=False, undecided=(), failing=()):
        self.pages = {} if pages is None else pages
        self.load_steps = load_steps
        self.hold_loads = hold_loads
        self.undecided = set(undecided)
        self.failing = set(failing)
        self.calls = []
        self.live = {}
        self.ended = []
        self.tables = {}
        self.new_loads = []
        self.loading = []
        self.loads_of = {}
        self.pending = False
        self.resets = 0
        self.is_shut_down = []
        self.spec = None
        self.engine = None

    def connect(self, spec, kv_caches):
        self.spec, self.kv_caches, self.block_tokens = spec, kv_caches, spec.tokens_per_hash
        return self, self

    # scheduler half

    def on_new_request(self, request):
        self.live[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        assert num_computed_tokens % self.block_tokens == 0
        self.calls.append(("ask", request.request_id, num_computed_tokens))
        if request.request_id in self.undecided:
            return None, False
        found = 0
        for block_hash in request.block_hashes[num_computed_tokens // self.block_tokens :]:
            if block_hash not in self.pages:
                break
            found += 1
        return found * self.block_tokens, found > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append(("alloc", request.request_id, num_external_tokens))
        (block_ids,) = blocks.get_block_ids()  # one KV group
        if num_external_tokens:
            count = num_external_tokens // self.block_tokens
            first = len(block_ids) - count
            hashes = request.block_hashes[first : first + count]
            self.new_loads.append((request.request_id, block_ids[first:], list(hashes)))
            self.loads_of[request.request_id] = self.loads_of.get(request.request_id, 0) + 1

    def build_connector_meta(self, step):
        self.calls.append(("meta",))
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            assert new.num_computed_tokens == self.live[new.req_id].num_computed_tokens
        cached = step.scheduled_cached_reqs
        for req_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert computed == self.live[req_id].num_computed_tokens
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = []
            if new_blocks is not None:
                self.tables[req_id] += new_blocks[0]
        meta = Meta(loads=self.new_loads)
        self.new_loads = []
        for req_id, count in step.num_scheduled_tokens.items():
            request = self.live[req_id]
            assert [self.tables[req_id]] == request.block_ids
            filled = min((request.num_computed_tokens + count) // self.block_tokens, len(request.block_hashes))
            meta.stores += zip(self.tables[req_id][:filled], request.block_hashes[:filled], strict=True)
        return meta

    def update_connector_output(self, output):
        self.calls.append(("output", tuple(sorted(output.finished_recving))))

    def request_finished(self, request):
        assert self.live.pop(request.request_id) is request
        if self.engine is not None:
            assert all(self.engine.scheduler.pool._uses[b] > 0 for b in request.block_ids[0])
        self.ended.append(request.request_id)
        return False, None

    def has_pending_push_work(self):
        return self.pending

    def reset_cache(self):
        self.resets += 1
        self.pages.clear()

    def get_stats(self):
        return {}

    # worker half

    def handle_preemptions(self, meta):
        self.calls.append(("preemptions",))

    def start_load_kv(self, meta):
        self.calls.append(("load",))
        for req_id, blocks, hashes in meta.loads:
            pages = [self.pages[h] for h in hashes]
            for cache in self.kv_caches.values():
                cache[torch.tensor(blocks)] = torch.nan
            self.loading.append([self.load_steps, req_id, blocks, pages])

    def wait_for_save(self, meta):
        self.calls.append(("save",))
        for block, block_hash in meta.stores:
            page = tuple(cache[block].clone() for cache in self.kv_caches.values())
            assert not any(part.isnan().any() for part in page)
            self.pages.setdefault(block_hash, page)

    def get_finished(self):
        self.calls.append(("finished",))
        ended, failed = set(), set()
        for load in list(self.loading):
            load[0] -= 1
            if load[0] > 0 or self.hold_loads:
                continue
            _, req_id, blocks, pages = load
            self.loading.remove(load)
            ended.add(req_id)
            if req_id in self.failing:
                failed.add(req_id)
                continue
            for block, page in zip(blocks, pages, strict=True):
                for cache, part in zip(self.kv_caches.values(), page, strict=True):
                    cache[block] = part
        return WorkerOutput(finished_recving=frozenset(ended), failed_recving=frozenset(failed))

    def shutdown(self):
        self.is_shut_down.append(True)


def engine(connector=None, *, offload=None, **settings):
    """An engine that does not sleep when idle; with the double, with Orlop's own connector, or alone.

    A slow machine must not end its drain: what is stored is found by the next one.
    """
    settings = {"idle_wait_s": 0.0, "num_blocks": 64, "drain_deadline_s": 60.0, **settings}
    llm = LLM(EngineConfig(**settings), offload=offload, connect=connector.connect if connector else None)
    if connector is not None:
        connector.engine = llm
    return llm


def run_checked(llm, max_steps=2_000):
    """All results by request id; the books are recounted after every step."""
    results = {}
    for _ in range(max_steps):
        if not llm.has_work():
            return results
        for result in llm.step():
            results[result.request_id] = result
        llm.check()
    raise AssertionError(f"after {max_steps} steps still waiting: {llm.scheduler.waiting}")


def greedy(llm, prompt, max_tokens):
    """The plain twin: every token from a computation of the whole prompt, alone and from nothing."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(llm.logits_after(tokens).argmax()))
    return tuple(tokens[len(prompt) :])
