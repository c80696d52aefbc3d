"""The runner with its I/O process: real processes, killed, stopped and orphaned for real."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tier_doubles import NAMESPACE, PATIENCE_S, Rig, keys, make_gate, open_gate, wait_arrived

from orlop.core import Outcome, TierResult, TransferKind
from orlop.errors import ConfigError
from orlop.tiering import runner
from orlop.tiering.io_messages import Clear, StoreSpec, Transfer

Make = Callable[..., Rig]

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux with pidfd_open")


def directory(path: Path) -> StoreSpec:
    return StoreSpec("tier_doubles:DirectoryStore", {"path": str(path)})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make_rig(spec: StoreSpec | None = None, **options: Any) -> Rig:
        rigs.append(Rig(spec or directory(tmp_path), **{"io_process": True, "restart_s": 0.01, **options}))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


def results_of_a_step(rig: Rig) -> list[TierResult]:
    """As an engine gets them, which does not wait for them."""
    deadline = time.monotonic() + PATIENCE_S
    while not (results := rig.runner.get_finished_jobs()):
        assert time.monotonic() < deadline, "no report came"
        time.sleep(0)
    return list(results)


def test_the_engines_thread_posts_and_collects_by_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(quiet=True)
    pid_of(rig)
    assert rig.runner.wait_counted(PATIENCE_S)
    with monkeypatch.context() as patch:
        patch.setattr(rig.runner._pump, "_pass_on", None)  # the sender would end if it got anything
        rig.store(keys(40))
        assert results_of_a_step(rig)[0].outcomes == (Outcome.OK,) * 40
        rig.load(keys(40))
        assert results_of_a_step(rig)[0].outcomes == (Outcome.OK,) * 40


def test_what_an_engine_does_not_fetch_is_kept_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """More reports than the wire holds, and nobody collects: the owner makes room."""
    rig = make(quiet=True)
    pid_of(rig)
    jobs = 12000
    with monkeypatch.context() as patch:
        patch.setattr(rig.runner._pump, "collect", lambda: None)
        for _ in range(jobs):
            rig.load(keys(1))
        rig.runner.shutdown(PATIENCE_S)
    results = rig.runner.get_finished_jobs()
    assert [result.outcomes for result in results] == [(Outcome.MISSING,)] * jobs


def test_who_waits_for_the_count_hears_of_it_also_after_words_that_came_before_it(make: Make, tmp_path: Path) -> None:
    rig = make(StoreSpec("tier_doubles:CountingStore", {"path": str(tmp_path)}), quiet=True)
    pid_of(rig)
    rig.ask(keys(1))
    deadline = time.monotonic() + PATIENCE_S
    while not rig.runner.get_answers() and rig.runner.get_stats().get("store_counted") is None:
        assert time.monotonic() < deadline, "no word came"
        time.sleep(0)
    assert not rig.runner.wait_counted(0.0)
    (tmp_path / "yes.counted").touch()
    assert rig.runner.wait_counted(PATIENCE_S)


@pytest.mark.parametrize("io_process", [True, False])
def test_a_job_that_cannot_be_sent_is_reported_all_the_same(
    make: Make, caplog: pytest.LogCaptureFixture, io_process: bool
) -> None:
    rig = make(io_process=io_process)
    assert rig.runner.wait_ready(PATIENCE_S) is None
    rig.fill([0])
    good = rig.job(TransferKind.STORE, keys(1))
    rig.runner.submit_store(replace(good, slots=None), now=rig.now)  # type: ignore[arg-type]
    (result,) = rig.results()
    assert result.outcomes == (Outcome.UNAVAILABLE,)
    assert any("could not be sent" in record.message for record in caplog.records)


def pid_of(rig: Rig) -> int:
    assert rig.runner.wait_ready(PATIENCE_S) is None
    pid = rig.runner.io_pid
    assert pid is not None
    return pid


def wait_ended(pidfd: int) -> None:
    """Until the process behind ``pidfd``, child or not, is gone."""
    try:
        assert select.select([pidfd], [], [], PATIENCE_S)[0], "the process is still there"
    finally:
        os.close(pidfd)


def test_what_is_stored_comes_back(make: Make) -> None:
    rig = make()
    rig.store(keys(70))
    assert rig.results()[0].outcomes == (Outcome.OK,) * 70
    assert rig.found(keys(71)) == b"\1" * 70 + b"\0"
    rig.region.checksums[100:] = 0
    rig.load(keys(70), 100)
    assert rig.results()[0].outcomes == (Outcome.OK,) * 70
    for i in range(70):
        assert rig.payload(100 + i) == rig.payload(i)
        assert (rig.region.checksums[100 + i] == rig.region.checksums[i]).all()
    assert rig.runner.get_stats()["io_restarts"] == 0


@pytest.mark.fault("B142")
@pytest.mark.fault("B204")
def test_killed_in_the_middle_everything_is_reported_and_it_comes_back(make: Make, tmp_path: Path) -> None:
    rig = make(threads=2)
    rig.store(keys(1))
    rig.results()
    make_gate(tmp_path, "write")
    make_gate(tmp_path, "read_into")
    rig.store(keys(40, b"a"))
    rig.load(keys(1))
    wait_arrived(tmp_path, "write")
    wait_arrived(tmp_path, "read_into")
    rig.store(keys(3, b"b"), 40)
    assert rig.found(keys(1)) == b"\1"
    for verb in ("write", "read_into"):
        (tmp_path / f"{verb}.gate").unlink()
    pid = rig.runner.io_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    results = rig.results(3)
    assert [set(result.outcomes) for result in results] == [{Outcome.UNAVAILABLE}] * 3
    assert all(result.released for result in results)
    assert "signal 9" in results[0].reason
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # it was dead, and reaped, before its slots were called free
    while True:  # until the next one is there, jobs fail and lookups find nothing, at once
        rig.now += 100.0
        rig.load(keys(1))
        if rig.results()[0].outcomes == (Outcome.OK,):
            break
    assert rig.runner.get_stats()["io_restarts"] >= 1
    assert rig.runner.io_pid != pid


def test_killed_while_it_clears_it_clears_again(make: Make, tmp_path: Path) -> None:
    rig = make()
    rig.store(keys(3))
    rig.results()
    make_gate(tmp_path, "delete")
    rig.runner.clear()
    wait_arrived(tmp_path, "delete")
    (tmp_path / "delete.gate").unlink()
    os.kill(pid_of(rig), signal.SIGKILL)
    while rig.store(keys(1, b"n")) and rig.results()[0].outcomes != (Outcome.OK,):
        rig.now += 100.0
    assert [bytes.fromhex(entry.name)[16:] for entry in tmp_path.iterdir() if not entry.suffix] == keys(1, b"n")


def test_nothing_overtakes_a_clear_that_waits_for_the_sender(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    pid_of(rig)
    pump = rig.runner._pump
    link = pump._link
    assert link is not None
    pass_on, post, send = pump._pass_on, link.post, link.send
    gate = threading.Event()
    went: list[Any] = []
    monkeypatch.setattr(pump, "_pass_on", lambda first: gate.wait(PATIENCE_S) and pass_on(first))
    monkeypatch.setattr(link, "post", lambda message: went.append(message) or post(message))
    monkeypatch.setattr(link, "send", lambda messages: went.extend(messages) or send(messages))
    rig.runner.clear()
    rig.store(keys(1))
    gate.set()
    rig.results()
    assert [type(message) for message in went] == [Clear, Transfer]


@pytest.mark.fault("B109")
def test_a_stopped_process_holds_up_neither_submission_nor_shutdown(make: Make) -> None:
    rig = make()
    pid = pid_of(rig)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(100):
        rig.load(keys(250), 0)
    for _ in range(100):  # several times what the socket holds
        rig.ask(keys(1000))
    rig.runner.shutdown(0.0)
    results = rig.results(100)
    assert all(set(result.outcomes) == {Outcome.UNAVAILABLE} and result.released for result in results)
    assert len(rig.answers(100)) == 100
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.fault("B109")
@pytest.mark.fault("B207")
def test_shutdown_kills_a_process_whose_store_hangs(make: Make, tmp_path: Path) -> None:
    make_gate(tmp_path, "write")
    rig = make()
    rig.store(keys(1))
    wait_arrived(tmp_path, "write")
    pid = pid_of(rig)
    rig.runner.shutdown(0.0)
    (result,) = rig.results()
    assert result.outcomes == (Outcome.UNAVAILABLE,)
    assert result.released
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_cannot_die_yet_keeps_its_slots_and_gives_them_back_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits in the kernel for a dead mount outlives SIGKILL; here SIGKILL is kept from a stopped one."""
    monkeypatch.setattr(runner, "KILL_GRACE_S", 0.01)
    rig = make()
    pid = pid_of(rig)
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        job = rig.store(keys(1))
        for _ in range(100):
            rig.ask(keys(1000))  # so that the sender is blocked in the middle of a word
        rig.runner.shutdown(0.0)
        (result,) = rig.results()
        assert result.outcomes == (Outcome.UNAVAILABLE,)
        assert not result.released
        assert len(rig.answers(100)) == 100
        assert not rig.runner.get_released_jobs()
        os.kill(pid, signal.SIGKILL)
        assert rig.released() == [job.job_id]


def test_shutdown_drains_what_is_queued(make: Make, tmp_path: Path) -> None:
    make_gate(tmp_path, "write")
    rig = make(threads=1)
    for i in range(20):
        rig.store([keys(20)[i]], i)
    wait_arrived(tmp_path, "write")
    open_gate(tmp_path, "write")
    rig.runner.shutdown(PATIENCE_S)
    assert all(result.outcomes == (Outcome.OK,) for result in rig.results(20))
    assert len(list(tmp_path.glob("*"))) == 21  # and the pipe


def test_shutdown_right_after_the_start_still_drains(make: Make, tmp_path: Path) -> None:
    rig = make()
    rig.store(keys(1))
    rig.runner.shutdown(PATIENCE_S)
    assert rig.results()[0].outcomes == (Outcome.OK,)


@pytest.mark.fault("B208")
def test_signals_that_are_meant_for_the_engine_do_not_end_it(make: Make, tmp_path: Path) -> None:
    rig = make()
    pid = pid_of(rig)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    rig.store(keys(1))
    rig.runner.shutdown(PATIENCE_S)
    assert rig.results()[0].outcomes == (Outcome.OK,)


def test_after_shutdown_nothing_is_left(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    descriptors = sorted(os.listdir("/proc/self/fd"))
    rig = Rig(directory(tmp_path), io_process=True)
    pid = pid_of(rig)
    rig.store(keys(5))
    rig.results()
    rig.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE_S)
    assert set(threading.enumerate()) <= threads
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


ENGINE = """
    import os, sys, threading
    from pathlib import Path
    from tier_doubles import PATIENCE_S, Rig, keys, wait_arrived
    from orlop.tiering.io_messages import StoreSpec

    path = Path(sys.argv[1])
    rig = Rig(StoreSpec("tier_doubles:" + sys.argv[3], {"path": str(path)}), io_process=True)
    rig.store(keys(1))
    assert rig.runner.wait_ready(PATIENCE_S) is None
    wait_arrived(path, "write")
    print(rig.runner.io_pid, flush=True)
    if sys.argv[2] == "fork" and os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    threading.Event().wait()
"""


@pytest.mark.fault("B208")
@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_a_killed_engine_leaves_no_orphan_even_with_a_hung_store_or_a_fork_of_its_own(
    tmp_path: Path, fork: str
) -> None:
    make_gate(tmp_path, "write")
    engine = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENGINE), str(tmp_path), fork, "DirectoryStore"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with engine:
        assert engine.stdout is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        if fork == "fork":
            assert engine.stdout.readline() == b"forked\n"
        engine.kill()
        wait_ended(pidfd)


@pytest.mark.fault("B208")
def test_a_killed_engine_leaves_no_orphan_that_waits_for_a_reader_of_its_log(tmp_path: Path) -> None:
    make_gate(tmp_path, "write")
    engine = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENGINE), str(tmp_path), "alone", "ChattyStore"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        open_gate(tmp_path, "write")
        assert engine.stderr.read(1)  # it has begun to speak
        engine.kill()
        wait_ended(pidfd)


FORKING = """
    import os, sys
    from tier_doubles import PATIENCE_S, Rig, keys
    from orlop.core import Outcome
    from orlop.tiering.io_messages import StoreSpec

    rig = Rig(StoreSpec("tier_doubles:DirectoryStore", {"path": sys.argv[1]}), io_process=True)
    assert rig.runner.wait_ready(PATIENCE_S) is None
    child = os.fork()
    if child == 0:
        rig.runner.shutdown(0.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rig.store(keys(1))
    assert rig.results()[0].outcomes == (Outcome.OK,)
    assert rig.runner.get_stats()["io_restarts"] == 0
    rig.close()
"""


FORKED_AT_START = """
    import os, signal, sys
    from tier_doubles import PATIENCE_S, Rig, keys
    from orlop.core import Outcome
    from orlop.tiering import io_links
    from orlop.tiering.io_messages import StoreSpec

    start, (ours, theirs) = io_links._start, os.pipe()

    def fork_too(*args):
        started = start(*args)
        if os.fork() == 0:
            os.close(theirs)
            os.read(ours, 1)  # until the engine ends
            os._exit(0)
        return started

    io_links._start = fork_too
    rig = Rig(StoreSpec("tier_doubles:DirectoryStore", {"path": sys.argv[1]}), io_process=True, restart_s=PATIENCE_S)
    assert rig.runner.wait_ready(PATIENCE_S) is None
    pid = rig.runner.io_pid
    os.kill(pid, signal.SIGSTOP)
    rig.store(keys(1))
    os.kill(pid, signal.SIGKILL)
    assert rig.results()[0].outcomes == (Outcome.UNAVAILABLE,)
    rig.close()
"""


def run(program: str, path: Path) -> subprocess.CompletedProcess[bytes]:
    """The program with its tier in ``path``, from its start to its end."""
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, timeout=4 * PATIENCE_S, check=False)


def test_a_fork_at_the_moment_of_the_start_does_not_hide_a_death(tmp_path: Path) -> None:
    assert run(FORKED_AT_START, tmp_path).returncode == 0


def test_a_fork_of_the_engine_cannot_end_the_engines_tier(tmp_path: Path) -> None:
    assert run(FORKING, tmp_path).returncode == 0


def test_it_starts_without_the_callers_main_module_or_stdin(make: Make) -> None:
    rig = make(StoreSpec("tier_doubles:NosyStore"))
    assert rig.runner.wait_ready(PATIENCE_S) is None


def test_a_setting_that_can_never_work_is_raised(make: Make) -> None:
    rig = make(StoreSpec("no_such_module:x"))
    with pytest.raises(ConfigError, match="no_such_module"):
        rig.runner.wait_ready(PATIENCE_S)


def test_a_process_that_dies_at_the_start_is_told_at_once(make: Make) -> None:
    rig = make(StoreSpec("tier_doubles:die"), restart_s=PATIENCE_S)
    text = rig.runner.wait_ready(PATIENCE_S)
    assert text is not None
    assert "status 3" in text
    assert rig.ask(keys(1))[1] is not None  # the breaker is open


def test_keys_in_the_store_begin_with_the_namespace(make: Make, tmp_path: Path) -> None:
    rig = make()
    rig.store(keys(1))
    rig.results()
    assert [entry.name for entry in tmp_path.iterdir()] == [(NAMESPACE.digest + keys(1)[0]).hex()]


def test_the_files_store_runs_in_it_and_remembers(make: Make, tmp_path: Path) -> None:
    spec = StoreSpec("orlop.stores.files:FilesStore", {"path": str(tmp_path), "max_bytes": 64 << 20})
    first = make(spec)
    first.store(keys(70))
    assert first.results()[0].outcomes == (Outcome.OK,) * 70
    payloads = [first.payload(i) for i in range(70)]
    first.close()
    second = make(spec)
    assert second.found(keys(71)) == b"\1" * 70 + b"\0"
    second.load(keys(71), 100)
    assert second.results()[0].outcomes == (Outcome.OK,) * 70 + (Outcome.MISSING,)
    assert [second.payload(100 + i) for i in range(70)] == payloads
