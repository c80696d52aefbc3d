"""kill -9 of a process that writes, again and again: what its write answered OK for is there, and no wrong byte is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chunks import load
from kill_child import KEYS, MIB

from orlop.core import Outcome
from orlop.stores.disk.device import used_bytes
from orlop.stores.disk.store import DiskStore

ROUNDS = int(os.environ.get("DISK_KILLS", "50"))
RECENT = 30
"""Keys; a quarter of what the slab holds."""
CHILD = Path(__file__).with_name("kill_child.py")


@pytest.mark.crash
@pytest.mark.fault("B202")
@pytest.mark.fault("B113")
def test_a_writer_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(11)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILD.parent), *filter(None, sys.path)])}
    child = subprocess.Popen(
        [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdin is not None
    assert child.stdout is not None
    newest: dict[int, int] = {}
    found = 0
    for life in range(ROUNDS):
        child.stdin.write(f"{tmp_path / 'tier'} {life}\n")
        child.stdin.flush()
        pid = int(child.stdout.readline())
        words = [child.stdout.readline() for _ in range(rng.randrange(1, 120))]
        os.kill(pid, signal.SIGKILL)
        while (word := child.stdout.readline()) != "gone\n":
            assert word, "the process that starts writers has ended"
            words.append(word)
        # A line may have been cut by the kill; what was cut was not told.
        recent: dict[int, None] = {}
        for word in words:
            if len(pair := word.split()) == 2 and word.endswith("\n"):
                newest[int(pair[0])] = int(pair[1])
                recent.pop(int(pair[0]), None)
                recent[int(pair[0])] = None
        found += look(tmp_path / "tier", newest, set(list(recent)[-RECENT:]))
    child.stdin.close()
    assert child.wait(60) == 0
    child.stdout.close()
    assert found > 20 * ROUNDS


def look(path: Path, newest: dict[int, int], recent: set[int]) -> int:
    """Open what was left; how much of it is there. What was told last cannot have been evicted since."""
    slab = DiskStore(path, max_bytes=MIB, direct_io="off")
    try:
        slab.check()
        assert slab.stats()["lane"] == 0, "a dead process still holds the lane"
        assert slab.stats().get("damaged_record_checksum", 0) == 0
        assert used_bytes(str(path)) <= MIB
        here = 0
        for number, (outcome, reason, version) in enumerate(load(slab, range(KEYS))):
            assert outcome in (Outcome.OK, Outcome.MISSING), f"key {number}: {outcome} {reason}"
            here += version is not None
            assert version is not None or number not in recent, f"key {number} was told a moment ago and is lost"
            if version is not None:
                # Newer than told: written, and killed before it could say so.
                assert version >= newest.get(number, 0), f"key {number} went back from {newest[number]} to {version}"
                newest[number] = version
        return here
    finally:
        slab.close()
