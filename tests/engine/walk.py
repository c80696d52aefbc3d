"""One life of the random walk: an engine over a store that fails half its operations, under a traffic of accidents.

Arguments: one JSON object: ``path``, ``model`` (``full`` or ``mixed``), ``async_scheduling``, ``life``, ``todo``
(numbers of the requests that have not ended in an earlier life). Prints a JSON object per line: requests as they end,
and at the end what became of the engine's books.
"""

from __future__ import annotations

import json
import random
import sys

import torch
from patience import PATIENT

from orlop.engine.llm import LLM, EngineConfig
from orlop.engine.model import ModelConfig

REQUESTS = 220
RESET_EVERY = 40
BLOCK_TOKENS = 4
MODELS = {"full": ModelConfig(layers=2), "mixed": ModelConfig(layers=2, windows=(None, 20))}


DEVICE_BLOCKS = {"full": 40, "mixed": 70}
"""One long request has room, three have not."""


def work(requests=REQUESTS):
    """Prompts by request number, and how many tokens each generates: turns of conversations, mixed."""
    source = random.Random(11)
    roots = [[source.randrange(512) for _ in range(80)] for _ in range(6)]
    prompts = {}
    for number in range(requests):
        root = source.choice(roots)
        tail = [source.randrange(512) for _ in range(source.randrange(1, 6))]
        prompts[number] = (root[: source.randrange(8, 80)] + tail, source.randrange(2, 12))
    return prompts


def engine(model, path=None, **settings):
    offload = None
    if path is not None:
        store = {"type": "orlop.testing.flaky_store:FlakyStore", "path": path, "bytes": "64MiB"}
        # Patient: what is lost is lost by failures, not because the machine was busy.
        store["deadline"] = dict(PATIENT)
        offload = {"host": {"bytes": 50 * 4096}, "blocks_per_chunk": 1, "tiers": [store]}
    return LLM(EngineConfig(model=MODELS[model], block_tokens=BLOCK_TOKENS, **settings), offload=offload)


def tell(**facts):
    print(json.dumps(facts), flush=True)


def main(path, model, async_scheduling, life, todo):
    torch.set_num_threads(1)
    prompts = work()
    source = random.Random(life)
    llm = engine(
        model,
        path,
        num_blocks=DEVICE_BLOCKS[model],
        max_step_tokens=48,
        async_scheduling=async_scheduling,
        drain_deadline_s=60.0,
    )
    resets = 0

    def step():
        for result in llm.step():
            tell(ended=result.request_id, tokens=result.tokens)
        if source.random() < 0.1:
            llm.check()
            llm.connector.check()

    for count, number in enumerate(todo):
        prompt, max_tokens = prompts[number]
        llm.add_request(prompt, max_tokens, request_id=str(number))
        if count % 50 == 5:  # surely before its end
            llm.abort(str(number))
            tell(aborted=str(number))
        for _ in range(source.randrange(6)):
            step()
        if source.random() < 0.1:
            victim = str(source.choice(todo[: count + 1]))
            if llm.abort(victim) is not None:
                tell(aborted=victim)
        if count % RESET_EVERY == RESET_EVERY - 1:
            llm.reset_prefix_cache()
            resets += 1
    while llm.has_work():
        step()
    llm.check()
    llm.connector.check()
    tail = random.Random(7)
    # Three that begin small and grow large have no room beside each other.
    llm.generate([[tail.randrange(512) for _ in range(10)] for _ in range(3)], 90)
    # Host memory serves, whatever the store below it lost: an empty device is asked once more for what is new to all.
    fresh = [tail.randrange(512) for _ in range(41)]
    first = llm.generate([fresh], 2)
    llm.scheduler.forget_prefixes()
    loaded_before = llm.connector.get_stats().get("tokens_loaded host", 0)
    again = llm.generate([fresh], 2)
    stats = dict(llm.connector.get_stats())
    tell(
        same=first[0].tokens == again[0].tokens,
        served=stats["tokens_loaded host"] - loaded_before,
        free=llm.scheduler.pool.num_free == llm.scheduler.pool.capacity,
        pending=llm.connector.has_pending_push_work(),
        preemptions=llm.scheduler.num_preemptions,
        resets=resets,
        stats=stats,
    )
    llm.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
