"""What each eviction policy finds again on recorded traces.

In: public traces (``TRACES``, or ../shared/traces from the repository; what is absent is skipped with a word). Out: one
table per trace: the share of prompt tokens that host memory serves, by policy and size of the tier, beside a tier
without a bound. Never: a time, a model, a byte of KV.

    python bench/policies_on_traces.py [--short] [--markdown]

Each request looks up its prompt, loads what is there, stores what is not, and has ended before the next one begins; no
prefix cache above. A chunk is one id of the trace. Sizes are shares of the different chunks that the trace has.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from orlop.cli.traces import TraceLine, overlaid, read_lines
from orlop.core import KeyRun
from orlop.host.policies import BUILT_IN, load_policy
from orlop.host.tier import HostTier

TRACES = Path(os.environ.get("TRACES", Path(__file__).resolve().parents[1].parent / "shared" / "traces"))
ROWS = (
    ("Mooncake conversation", "mooncake/conversation_trace.jsonl.gz", 1),
    ("Mooncake synthetic", "mooncake/synthetic_trace.jsonl.gz", 1),
    ("LMCache agent, miniswe, 8 sessions in turn", "lmcache-agent/miniswe_cl100k_block16.jsonl.gz", 8),
    ("LMCache agent, magagent, 8 sessions in turn", "lmcache-agent/magagent_cl100k_block16.jsonl.gz", 8),
)
SHARES = (0.01, 0.03, 0.1, 0.3)
SHORT_LINES = 400
POLICIES = ("lru", *sorted(BUILT_IN.keys() - {"lru"}))


def chunks_of(line: TraceLine) -> list[bytes]:
    """One key per whole chunk of a prompt; a last id that stands for a part of one is none."""
    whole = line.input_length // line.format.block_tokens
    return [b"%d" % number for number in line.hash_ids[:whole]]


def found(prompts: Iterable[Sequence[bytes]], slots: int, policy: str) -> tuple[int, int]:
    """Chunks that a tier of ``slots`` slots serves, and all that are asked for."""
    tier = HostTier(slots, load_policy(policy, slots))
    hits = asked = 0
    for hashes in prompts:
        run = KeyRun(0, hashes, 0, len(hashes))
        loaded = tier.ready_slots(run)
        hits, asked = hits + len(loaded), asked + len(run)
        tier.touch_slots(loaded)
        store_rest(tier, run, len(loaded))
    return hits, asked


def store_rest(tier: HostTier, run: KeyRun, have: int) -> None:
    """As many of the next chunks as there is room for; a later one may still be there and is of use again."""
    tier.touch(run.part(run.start + have, run.stop))
    states = tier.states(run)
    absent = [i for i in range(have, len(run)) if not states[i]]
    while absent and (slots := tier.reserve(run, absent)) is None:
        absent = absent[: len(absent) // 2]
    if absent:
        tier.publish(slots)
        tier.unhold(slots)


def table(name: str, prompts: list[list[bytes]], markdown: bool) -> None:
    different = len(set(itertools.chain.from_iterable(prompts)))
    hits, asked = found(prompts, max(1, different), "lru")
    print(f"\n{name}: {len(prompts)} requests, {asked} chunks, {different} different ones", end="; ")
    print(f"without a bound {hits / asked:.4f}")
    columns = ["slots", *POLICIES]
    print(
        "| " + " | ".join(columns) + " |\n|" + "---:|" * len(columns)
        if markdown
        else "".join(f"{c:>10}" for c in columns)
    )
    for share in SHARES:
        slots = max(8, int(share * different))
        ratios = [hits / asked for hits, asked in (found(prompts, slots, policy) for policy in POLICIES)]
        cells = [f"{slots}", *(f"{ratio:.4f}" for ratio in ratios)]
        print("| " + " | ".join(cells) + " |" if markdown else "".join(f"{cell:>10}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help=f"the first {SHORT_LINES} lines of each trace")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    args = parser.parse_args()
    print("the share of prompt chunks that host memory serves")
    for name, file, sessions in ROWS:
        path = TRACES / file
        if not path.exists():
            print(f"\n{name}: skipped, no recorded trace at {path}")
            continue
        lines = list(itertools.islice(read_lines(path), SHORT_LINES if args.short else None))
        table(name, [chunks_of(line) for line in overlaid(lines, sessions)], args.markdown)


if __name__ == "__main__":
    main()
