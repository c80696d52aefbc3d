"""``orlop run`` in a process of its own: tables, exit codes, messages."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from cli_processes import TIMEOUT_S, orlop, orlop_here, rows_of, stopped

from orlop import __version__
from orlop.cli.main import main
from orlop.cli.stopping import stop_signals
from orlop.testing.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two turns and a half of 24 conversations behind one system prompt, in turn, as a Mooncake-like trace."""
    path, fresh = tmp_path_factory.mktemp("trace") / "conversations.jsonl", itertools.count(32)
    prompts = [list(range(32)) for _ in range(24)]
    with path.open("w") as file:
        for number in range(60):
            ids = prompts[number % 24]
            ids += itertools.islice(fresh, 20)
            line = {"session": number % 24, "input_length": len(ids) * 16 + 5, "output_length": 8, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
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
    done = orlop_here("run", "--trace", trace, *SMALL, "--limit", 3, "--reference", reference, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["without_offload"]["requests"] == 3
    assert len(json.loads(reference.read_text())["report"]["tokens"]) == 3


def test_a_wrong_token_is_named_and_the_exit_code_is_1(trace, tmp_path):
    reference = tmp_path / "reference.json"
    options = ("run", "--trace", trace, *SMALL, "--limit", 3, "--reference", reference)
    assert orlop_here(*options).returncode == 0
    kept = json.loads(reference.read_text())
    kept["report"]["tokens"]["line-2"][1] ^= 1
    reference.write_text(json.dumps(kept))
    done = orlop_here(*options)
    assert done.returncode == 1
    assert "tokens: 2 equal, 0 ties, 1 different" in done.stdout
    assert "line-2: generated token 1 is" in done.stdout


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
def test_the_table_has_a_column_per_run(trace, tmp_path, scheduling):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"host": "8MiB", "blocks_per_chunk": 1}))
    done = orlop_here("run", "--trace", trace, *SMALL, "--limit", 30, "--config", config, scheduling)
    assert done.returncode == 0, done.stderr
    for word in ("without offload", "with offload", "tokens loaded", "from host", "30 equal, 0 ties, 0 different"):
        assert word in done.stdout
    alone = orlop_here("run", "--trace", trace, *SMALL, "--limit", 3, "--config", config, "--no-compare")
    assert alone.returncode == 0, alone.stderr
    assert "without offload" not in alone.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "{dir}/missing"], "--trace {dir}/missing: cannot be read: No such file or directory; give a file"),
        (["--trace", "{dir}/broken"], "broken, line 1: found no JSON"),
        (["--trace", "{trace}", "--device-blocks", 5], "--device-blocks: found 5, the largest request needs"),
        (["--trace", "{trace}", "--device-blocks", 2**31 - 1], "lower num_blocks (orlop run: --device-blocks)"),
        (["--trace", "{trace}", "--config", "{dir}/missing"], "--config {dir}/missing: cannot be read: No such"),
        (["--trace", "{trace}", "--config", "{dir}/broken"], "broken: found no JSON"),
        (["--trace", "{trace}", "--config", "{dir}/typo"], "hots"),
        (["--trace", "{trace}", "--config", "{dir}/typo", "--files-path", "{dir}"], "expected one of them"),
        (["--trace", "{trace}", "--config", "{dir}/small"], "host.bytes"),
        (
            ["--trace", "{trace}", "--reference", "{dir}/no/such"],
            "--reference {dir}/no/such: cannot be written: No such",
        ),
        (["--trace", "{trace}", "--reference", "{dir}/r", "--no-compare"], "found --reference and a run that compares"),
        (["--trace", "{trace}", "--no-offload", "--no-compare"], "which leaves nothing to run"),
        (["--trace", "{trace}", "--output", "{dir}/no/such"], "--output {dir}/no/such: cannot be written: No such"),
        (["--trace", "{trace}", "--prompts", "{trace}"], "found --prompts and --trace, expected one of them"),
        ([], "found neither --prompts nor --trace"),
        (["--trace", "{trace}", "--metrics-port", "{port}"], "metrics port: found {port} on 127.0.0.1 not to be had"),
        (["--trace", "{trace}", "--metrics-port", "0", "--no-offload"], "found --metrics-port and --no-offload"),
        (
            ["--prompts", "{dir}/ids", "--output", "{dir}/ids"],
            "{dir}/ids: found the file that --prompts names",
        ),
        (["--prompts", "{dir}/ids", "--output", "{dir}/link"], "found the file that --prompts names"),
        (["--trace", "{trace}", "--output", "{trace}"], "found the file that --trace names"),
        (["--prompts", "{dir}/one", "--config", "{dir}/typo", "--output", "{dir}/typo"], "that --config names"),
        (
            ["--prompts", "{dir}/one", "--reference", "{dir}/one"],
            "{dir}/one: found the file that --prompts names",
        ),
        (["--prompts", "{dir}/one", "--reference", "{dir}/ids", "--output", "{dir}/ids"], "that --output names"),
        (["--prompts", "{dir}/one", "--output", "/dev/full"], "--output /dev/full: cannot be written: No space left"),
        (["--prompts", "{dir}/one", "--reference", "/dev/full"], "--reference /dev/full: found neither file nor"),
        (["--prompts", "{dir}/one", "--reference", "{long}"], "cannot be written: File name too long"),
        (["--prompts", "{dir}/one", "--model", "{long}"], "found no directory"),
        (["--prompts", "{dir}/one", "--config", "/dev/zero"], "--config /dev/zero: found a device, expected a JSON"),
        (["--prompts", "{dir}/one", "--config", "{dir}"], "--config {dir}: cannot be read: Is a directory"),
        (["--prompts", "/dev/zero"], "line 1: found more than 67108864 bytes in a line"),
        (["--prompts", "{dir}/many"], "many, line 1: found 9999999999 for 'max_tokens', expected a whole number from"),
        (["--prompts", "{dir}/one", "--device-blocks", 2**31 - 1, "--block-tokens", 65_536], "num_blocks: found"),
        (["--prompts", "{dir}/missing"], "--prompts {dir}/missing: cannot be read: No such file"),
        (["--prompts", "{dir}/broken"], "broken, line 1: found no JSON"),
        (["--prompts", "{dir}/text"], "text, line 1: found the prompt 'hello', expected a list of token ids"),
        (["--prompts", "{dir}/ids"], "ids, line 1: found the token id 512, expected ids from 0 to 511"),
        (["--model", "{dir}/missing", "--trace", "{trace}"], "model {dir}/missing: found no directory"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(trace, tmp_path, arguments, says, monkeypatch, capsys):
    (tmp_path / "broken").write_text("{\n")
    (tmp_path / "typo").write_text('{"hots": "64MiB"}')
    (tmp_path / "small").write_text('{"host": 1}')
    (tmp_path / "text").write_text('"hello"')
    (tmp_path / "ids").write_text("[511, 512]")
    (tmp_path / "one").write_text("[1, 2, 3]")
    (tmp_path / "many").write_text('{"prompt": [1], "max_tokens": 9999999999}')
    (tmp_path / "link").symlink_to("ids")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"dir": tmp_path, "trace": trace, "port": taken.getsockname()[1], "long": "x" * 5000}
        arguments = [str(a).format(**names) for a in arguments]
        monkeypatch.setattr(sys, "argv", ["orlop", "run", "--limit", "1", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert says.format(**names) in err
    errors = [line for line in err.splitlines() if line.startswith("orlop: ")]
    assert (out, len(errors), "Traceback" in err) == ("", 1, False)
    assert (tmp_path / "ids").read_text() == "[511, 512]"
    assert (tmp_path / "one").read_text() == "[1, 2, 3]"


@pytest.fixture
def engine_with_metrics(long_trace):
    """A run that goes on for long, what it has logged at its start, and the end of it."""
    command = [sys.executable, "-m", "orlop", "run", "--trace", str(long_trace), "--metrics-port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *map(str, SMALL)], **pipes) as process:
        said = ""
        try:
            while "offloading is on" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            yield process, said
        finally:
            process.kill()


def test_metrics_are_at_the_port_while_it_runs_and_the_log_says_what_is_on(engine_with_metrics):
    process, said = engine_with_metrics
    url = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", said)[1]
    deadline = time.monotonic() + TIMEOUT_S
    stored = re.compile(r"^vllm:kv_offload_store_bytes_total\{.*\} [1-9]", re.MULTILINE)
    while not stored.search(text := urllib.request.urlopen(url, timeout=TIMEOUT_S).read().decode()):
        assert time.monotonic() < deadline, text
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "stopped" in out


@pytest.mark.parametrize(
    "option", ["--limit", "--threads", "--device-blocks", "--block-tokens", "--step-tokens", "--concurrency"]
)
def test_a_number_that_no_machine_has_is_refused_by_its_option(trace, option):
    done = orlop_here("run", "--trace", trace, option, 10**20)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
    assert f"Invalid value for '{option}'" in done.stderr


def through_a_pipe(said, *arguments):
    command = [sys.executable, "-m", "orlop", *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_prompts_may_come_through_a_pipe():
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe:
        pipe.write("[1, 2, 3]\n[4]\n")
        pipe.close()
        done = orlop_here("run", "--prompts", f"/dev/fd/{read}", "--no-compare", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["with_offload"]["requests"] == 2


def test_settings_may_come_through_a_pipe():
    done = through_a_pipe('{"host": "4MB"}', "doctor", "--config", "/dev/stdin", "--json")
    assert json.loads(done.stdout)["settings"]["host.bytes"] == {"value": 4_000_000, "origin": "config"}


@pytest.mark.parametrize("command", [["--version"], ["--help"], ["doctor"], ["doctor", "--json"]])
def test_a_full_disk_below_standard_output_is_one_line(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orlop", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "orlop: output cannot be written: No space left on device; make room there\n"


def test_ctrl_c_while_the_commands_are_imported_says_nothing():
    program = (
        "import sys, runpy\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "runpy.run_module('orlop', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_quiet_is_quiet(trace):
    assert orlop_here("run", "--trace", trace, *SMALL, "--limit", 2, "--no-compare", "--quiet").stderr == ""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=400)


def test_ones_own_model_and_prompts_give_a_line_per_request_and_equal_tokens(model, tmp_path):
    """Full and windowed layers; texts and ids; a device cache that holds little more than one prompt."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    stem = "The orlop is the lowest deck of a ship. " * 6
    lines = [stem + word for word in ("Why?", "Who?")] * 2 + [[1, 2, 3]]
    lines += [{"prompt": "short", "max_tokens": 3, "id": "mine"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ("--prompts", prompts, "--output", output, "--max-output", 5, "--concurrency", 1, "--device-blocks", 36)
    done = orlop_here("run", "--model", model, *options, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["tokens"]["equal"] + summary["tokens"]["ties"], summary["tokens"]["different"]) == (6, [])
    assert summary["with_offload"]["total_ratio"] > 0
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["request_id"] for r in results] == ["line-1", "line-2", "line-3", "line-4", "line-5", "mine"]
    assert [len(r["tokens"]) for r in results if r["finish_reason"] == "length"][-1] == 3
    assert all(isinstance(r["text"], str) and r["first_token_s"] > 0 for r in results)
    assert results[0]["tokens"] == results[2]["tokens"]


def broken_model(model, where, how):
    path = shutil.copytree(model, where)
    if how == "architecture":
        (path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    elif how == "weights":
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "tokenizer":
        (path / "tokenizer.json").unlink()
    return path


@pytest.mark.parametrize(
    ("how", "line", "says"),
    [
        ("architecture", '"hello"', "MambaForCausalLM"),
        ("weights", '"hello"', "model.safetensors"),
        ("tokenizer", '"hello"', "line 1: found the prompt 'hello', expected a list of token ids"),
        ("nothing", json.dumps("x" * 400), "line 1: found 401 prompt tokens and 32 to generate, expected at most 400"),
    ],
)
def test_a_model_that_cannot_be_run_or_a_prompt_it_cannot_take_is_one_line(
    model, tmp_path, how, line, says, monkeypatch, capsys
):
    path, prompts = broken_model(model, tmp_path / "model", how), tmp_path / "prompts.jsonl"
    prompts.write_text(line)
    monkeypatch.setattr(sys, "argv", ["orlop", "run", "--model", str(path), "--prompts", str(prompts)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert says in err
    assert err.startswith("orlop: ")
    assert "Traceback" not in err


def test_a_fault_of_ours_is_a_plain_traceback(monkeypatch):
    monkeypatch.setattr("orlop.cli.run.run", None)
    with pytest.raises(TypeError):
        orlop_here("run")


def test_settings_that_do_not_fit_the_engine_are_said_before_the_first_run(trace, tmp_path):
    config, reference = tmp_path / "config.json", tmp_path / "reference.json"
    config.write_text(json.dumps({"host": {"bytes": 1_000}}))
    done = orlop_here("run", "--trace", trace, *SMALL, "--config", config, "--reference", reference)
    assert (done.returncode, done.stdout, done.stderr.count("host.bytes: found 1000")) == (2, "", 1)
    assert not reference.exists()


def test_where_no_prompt_is_longer_than_a_chunk_a_line_says_so(tmp_path):
    """A chunk is 256 tokens by default."""
    path, config = tmp_path / "short.jsonl", tmp_path / "config.json"
    path.write_text(json.dumps({"input_length": 3_200, "output_length": 1, "hash_ids": list(range(7))}))
    config.write_text(json.dumps({"host": "8MiB"}))
    options = ("run", "--trace", path, "--config", config, "--no-compare")
    done = orlop_here(*options)
    says = "\nnothing was loaded: a chunk is 256 tokens and the longest prompt has 100, expected more than a chunk; "
    assert (done.returncode, done.stdout.count(says)) == (0, 1), done.stdout + done.stderr
    scale = "\nthe trace is scaled: 100 prompt tokens for its 3,200 (--tokens-per-trace-block)\n"
    assert done.stdout.count(scale) == 1, done.stdout
    said = json.loads(orlop_here(*options, "--json").stdout)
    assert said["nothing_loaded"] == {"why": "short_prompts", "chunk_tokens": 256, "longest_prompt_tokens": 100}
    assert said["trace"] == {
        "recorded_prompt_tokens": 3_200,
        "prompt_tokens": 100,
        "recorded_output_tokens": 1,
        "output_tokens": 1,
    }


def test_prompts_of_ids_and_of_text_that_are_too_short_get_the_same_line(model, tmp_path):
    ids, text = tmp_path / "ids.jsonl", tmp_path / "text.jsonl"
    ids.write_text("[1, 2, 3]\n[1, 2, 3]\n")
    text.write_text('"short"\n"short"\n')
    for options, chunk, longest in (
        (("--prompts", ids), 32, 3),
        (("--prompts", text, "--model", model), 16, 6),
    ):
        done = orlop_here("run", *options, "--no-compare", "--max-output", 2)
        says = f"\nnothing was loaded: a chunk is {chunk} tokens and the longest prompt has {longest}, expected more"
        assert (done.returncode, done.stdout.count(says)) == (0, 1), done.stdout + done.stderr
        assert "the trace is scaled" not in done.stdout


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


def test_a_signal_stops_the_run_with_what_was_done(long_trace, tmp_path):
    options = ("run", "--json", "--no-compare", "--trace", long_trace, *SMALL)
    code, out = stopped(signal.SIGTERM, rb"with offload: [1-9]\d* of 6000", tmp_path, *options)
    assert code == 130
    summary = json.loads(out)
    assert summary["interrupted"]
    assert 1 <= summary["with_offload"]["requests"] < 6_000


@pytest.mark.parametrize(("form", "signum"), [("table", signal.SIGINT), ("json", signal.SIGTERM)])
def test_a_run_that_is_stopped_before_offload_is_compared_has_one_column(long_trace, tmp_path, form, signum):
    output = tmp_path / "results.jsonl"
    options = ("run", "--trace", long_trace, *SMALL, "--output", output, *(["--json"] if form == "json" else []))
    code, out = stopped(signum, rb"with offload: [1-9]\d* of 6000", tmp_path, *options)
    assert code == 130
    num_done = len(output.read_text().splitlines())
    assert 1 <= num_done < 6_000
    if form == "json":
        summary = json.loads(out)
        assert (summary["interrupted"], summary["without_offload"], summary["tokens"]) == (True, None, None)
        assert summary["with_offload"]["requests"] == num_done
    else:
        assert "without offload" not in out
        assert out.endswith(
            "\nstopped: the figures are of what was done until then, also for requests that did not end\n"
        )
        rows = {name: counts[0] for name, counts in rows_of(out).items()}
        assert rows["requests that ended"] == num_done
        assert rows.get("requests stopped on the way", 0) <= 4  # all may have ended in the last step
        # A tier from which nothing has come yet has no row.
        assert rows["tokens loaded"] == sum(count for label, count in rows.items() if label.startswith("from "))
        done = rows["tokens computed"] + rows["tokens found on the device"] + rows["tokens loaded"]
        assert done == rows["tokens needed"] + rows["tokens again or unused"]


def test_the_second_signal_ends_a_run_that_does_not_stop():
    with stop_signals() as must_stop:
        signal.raise_signal(signal.SIGTERM)
        assert must_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_more_tokens_per_id_than_memory_holds_are_refused(trace):
    done = orlop_here("run", "--trace", trace, "--tokens-per-trace-block", 99_999_999_999)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "4096" in done.stderr


def test_version_and_help():
    assert orlop("--version").stdout == f"orlop {__version__}\n"
    assert "--tokens-per-trace-block" in orlop_here("run", "--help").stdout


def test_help_is_quick_because_nothing_heavy_is_imported_for_it():
    program = (
        "import sys; from orlop.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'pulled in {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "orlop demo" in done.stdout
