"""``orlop run`` and ``orlop demo`` in processes of their own: tables, exit codes, messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from orlop.cli import demo
from orlop.cli.main import main
from orlop.cli.stopping import stop_signals

TIMEOUT_S = 120


def orlop(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "orlop", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The first 60 lines of the demo's workload: two turns and a half of every conversation."""
    path = tmp_path_factory.mktemp("trace") / "conversations.jsonl"
    lines = [json.dumps(line) for line in demo.workload()]
    path.write_text("\n".join(lines[:60]) + "\n")
    return path


SMALL = ("--tokens-per-trace-block", 8, "--device-blocks", 80)


@pytest.fixture(scope="module")
def two_runs(trace, tmp_path_factory):
    """Two processes one after the other over the same files; the second uses the reference of the first."""
    folder = tmp_path_factory.mktemp("run")
    options = ("--files-path", folder / "files", "--reference", folder / "reference.json", "--json")
    done = [orlop("run", "--trace", trace, *SMALL, *options) for _ in range(2)]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    return [json.loads(d.stdout) for d in done]


def test_tokens_are_those_of_a_run_without_offload(two_runs):
    for summary in two_runs:
        assert summary["tokens"]["equal"] + summary["tokens"]["ties"] == 60
        assert summary["tokens"]["different"] == []


def test_a_second_process_loads_from_the_files_of_the_first(two_runs):
    first, second = (s["with_offload"] for s in two_runs)
    assert second["loaded_tokens_from_0:files"] > 0
    assert second["computed_tokens"] < first["computed_tokens"] < two_runs[0]["without_offload"]["computed_tokens"]
    for figures in (first, second):
        assert figures["loaded_tokens"] == figures["loaded_tokens_from_host"] + figures["loaded_tokens_from_0:files"]


def test_the_reference_is_not_computed_twice(two_runs):
    assert two_runs[1]["without_offload"] == two_runs[0]["without_offload"]


def test_a_reference_of_other_requests_is_computed_anew(trace, tmp_path):
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"fingerprint": "of something else", "report": {}}))
    done = orlop("run", "--trace", trace, *SMALL, "--limit", 3, "--reference", reference, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["without_offload"]["requests"] == 3
    assert len(json.loads(reference.read_text())["report"]["tokens"]) == 3


def test_a_wrong_token_is_named_and_the_exit_code_is_1(trace, tmp_path):
    reference = tmp_path / "reference.json"
    options = ("run", "--trace", trace, *SMALL, "--limit", 3, "--reference", reference)
    assert orlop(*options).returncode == 0
    kept = json.loads(reference.read_text())
    kept["report"]["tokens"]["line-2"][1] ^= 1
    reference.write_text(json.dumps(kept))
    done = orlop(*options)
    assert done.returncode == 1
    assert "tokens: 2 equal, 0 ties, 1 different" in done.stdout
    assert "line-2: generated token 1 is" in done.stdout


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
def test_the_table_has_a_column_per_run(trace, tmp_path, scheduling):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"host": "8MiB", "blocks_per_chunk": 1}))
    done = orlop("run", "--trace", trace, *SMALL, "--limit", 30, "--config", config, scheduling)
    assert done.returncode == 0, done.stderr
    for word in ("without offload", "with offload", "tokens loaded", "from host", "30 equal, 0 ties, 0 different"):
        assert word in done.stdout
    alone = orlop("run", "--trace", trace, *SMALL, "--limit", 3, "--config", config, "--no-compare")
    assert alone.returncode == 0, alone.stderr
    assert "without offload" not in alone.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "{dir}/missing"], "--trace {dir}/missing: cannot be read: No such file or directory; give a file"),
        (["--trace", "{dir}/broken"], "broken, line 1: found no JSON"),
        (["--trace", "{trace}", "--device-blocks", 5], "--device-blocks: found 5, the largest request needs"),
        (["--trace", "{trace}", "--device-blocks", 999_999_999_999], "lower num_blocks (orlop run: --device-blocks)"),
        (["--trace", "{trace}", "--config", "{dir}/missing"], "--config {dir}/missing: cannot be read: No such"),
        (["--trace", "{trace}", "--config", "{dir}/broken"], "broken: found no JSON"),
        (["--trace", "{trace}", "--config", "{dir}/typo"], "hots"),
        (["--trace", "{trace}", "--config", "{dir}/typo", "--files-path", "{dir}"], "expected one of them"),
        (["--trace", "{trace}", "--config", "{dir}/small"], "host.bytes"),
        (
            ["--trace", "{trace}", "--reference", "{dir}/no/such"],
            "--reference {dir}/no/such: cannot be written: No such",
        ),
        (["--trace", "{trace}", "--reference", "{dir}/r", "--no-compare"], "found --no-compare and --reference"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(trace, tmp_path, arguments, says, monkeypatch, capsys):
    (tmp_path / "broken").write_text("{\n")
    (tmp_path / "typo").write_text('{"hots": "64MiB"}')
    (tmp_path / "small").write_text('{"host": 1}')
    arguments = [str(a).format(dir=tmp_path, trace=trace) for a in arguments]
    monkeypatch.setattr(sys, "argv", ["orlop", "run", "--limit", "1", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert says.format(dir=tmp_path) in err
    assert (out, err.count("\norlop: "), err.startswith("orlop: ")) == ("", 0, True)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nope"])
def test_a_work_dir_of_the_demo_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path, place, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(sys, "argv", ["orlop", "demo", "--work-dir", str(tmp_path / place)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"orlop: --work-dir {tmp_path / place}: cannot be used: ")


def test_a_fault_of_ours_is_a_plain_traceback():
    program = "import sys; from orlop.cli import demo, main; demo.run_demo = None; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "demo"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


def test_settings_that_do_not_fit_the_engine_are_said_before_the_first_run(trace, tmp_path):
    config, reference = tmp_path / "config.json", tmp_path / "reference.json"
    config.write_text(json.dumps({"host": {"bytes": 1_000}}))
    done = orlop("run", "--trace", trace, *SMALL, "--config", config, "--reference", reference)
    assert (done.returncode, done.stdout, done.stderr.count("host.bytes: found 1000")) == (2, "", 1)
    assert not reference.exists()


def test_where_no_prompt_fills_a_chunk_a_hint_says_so(tmp_path):
    """A chunk is 256 tokens by default; with 16 blocks of 16 it is never full."""
    path, config = tmp_path / "short.jsonl", tmp_path / "config.json"
    path.write_text(json.dumps({"input_length": 3_200, "output_length": 1, "hash_ids": list(range(7))}))
    config.write_text(json.dumps({"host": "8MiB"}))
    options = ("run", "--trace", path, "--config", config, "--no-compare")
    done = orlop(*options)
    says = "\nno chunk was filled: a chunk is 256 tokens, the longest prompt has 100; set blocks_per_chunk\n"
    assert (done.returncode, done.stdout.count(says)) == (0, 1), done.stdout + done.stderr
    hint = json.loads(orlop(*options, "--json").stdout)["no_chunk_filled"]
    assert hint == {"chunk_tokens": 256, "longest_prompt_tokens": 100}
    config.write_text(json.dumps({"host": "8MiB", "blocks_per_chunk": 6}))
    assert json.loads(orlop(*options, "--json").stdout)["no_chunk_filled"] is None


def test_without_torch_the_extra_to_install_is_named():
    program = "import sys; sys.modules['torch'] = None; from orlop.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--trace", "any"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "orlop: the embedded engine needs torch: pip install 'orlop[engine]'\n"


@pytest.fixture(scope="module")
def long_trace(trace):
    path = trace.with_name("long.jsonl")
    path.write_text(trace.read_text() * 100)
    return path


def stopped(signum, said_before, tmp_path, *arguments, has_temporary=True):
    """Exit code and standard output of a command that gets ``signum`` once its progress says ``said_before``.

    Its temporary directories must be gone afterwards.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ours, theirs = os.openpty()  # progress is shown to terminals only
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "orlop", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "TMPDIR": str(temporary)},
        )
        os.close(theirs)
        said = b""
        while not re.search(said_before, said):
            said += terminal.read(1024)
        assert bool(list(temporary.iterdir())) == has_temporary
        process.send_signal(signum)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert list(temporary.iterdir()) == []
    return process.returncode, out


SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_a_signal_stops_the_run_with_what_was_done(long_trace, tmp_path, signum):
    options = ("run", "--json", "--no-compare", "--trace", long_trace, *SMALL)
    code, out = stopped(signum, rb"with offload: [1-9]\d* of 6000", tmp_path, *options)
    assert code == 130
    summary = json.loads(out)
    assert summary["interrupted"]
    assert 1 <= summary["with_offload"]["requests"] < 6_000


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_run_that_is_stopped_before_offload_has_no_column_for_it(long_trace, tmp_path, form):
    options = ("run", "--trace", long_trace, *SMALL, *(["--json"] if form == "json" else []))
    code, out = stopped(signal.SIGINT, rb"without offload: [1-9]\d* of 6000", tmp_path, *options)
    assert code == 130
    if form == "json":
        summary = json.loads(out)
        assert (summary["interrupted"], summary["with_offload"], summary["tokens"]) == (True, None, None)
        assert 1 <= summary["without_offload"]["requests"] < 6_000
    else:
        assert out.replace("without offload", "").count("with offload") == 1
        assert out.endswith("\nstopped before the run with offload\n")
        assert "tokens computed" in out


@SIGNALS
def test_a_signal_stops_the_demo_and_its_process(tmp_path, signum):
    work_dir, said = tmp_path / "work", rb"without offload: [1-9]\d* of"
    code, out = stopped(signum, said, tmp_path, "demo", "--work-dir", work_dir, has_temporary=False)
    assert (code, out.splitlines()[-1]) == (130, "stopped")
    assert "FAILED" not in out
    assert not (work_dir / "without-offload.json").exists()  # written where the run without offload comes to its end


def test_a_demo_that_is_stopped_leaves_nothing_behind(tmp_path):
    code, _ = stopped(signal.SIGTERM, rb"without offload: [1-9]\d* of", tmp_path, "demo")
    assert code == 130


def test_the_second_signal_ends_a_run_that_does_not_stop():
    with stop_signals() as must_stop:
        signal.raise_signal(signal.SIGTERM)
        assert must_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_demo_ends_well(tmp_path, capsys):
    assert demo.run_demo(tmp_path, conversations=8) == 0
    out = capsys.readouterr().out
    assert out.count("32 equal, 0 ties, 0 different") == 2
    assert "FAILED" not in out


def test_the_demo_fails_where_its_tables_do_not_show_what_they_should():
    figures = {"computed_tokens": 1, "loaded_tokens_from_host": 5, "loaded_tokens_from_0:files": 0}
    summary = {"tokens": {"equal": 31, "ties": 1, "different": []}, "with_offload": figures}
    assert demo._problems(1, 0, summary, 32) == []
    assert demo._problems(2, 0, summary, 32) == ["process 2 loaded nothing from the files of process 1"]
    figures["loaded_tokens_from_0:files"] = 1
    assert demo._problems(2, 0, summary, 32) == []
    wrong = "process 2 did not generate the tokens of the run without offload"
    assert demo._problems(2, 1, summary, 32) == [wrong]
    assert demo._problems(2, 0, summary, 33) == [wrong]


def test_more_tokens_per_id_than_memory_holds_are_refused(trace):
    done = orlop("run", "--trace", trace, "--tokens-per-trace-block", 99_999_999_999)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "4096" in done.stderr


def test_version_and_help():
    assert orlop("--version").stdout.startswith("orlop")
    assert "--tokens-per-trace-block" in orlop("run", "--help").stdout
