"""``orlop demo``: four ways, equal tokens, and what it says where they are not."""

from __future__ import annotations

import json
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from cli_processes import stopped
from rich.console import Console

from orlop.cli import demo
from orlop.cli.main import main
from orlop.cli.plot import chart

CONVERSATIONS = 6


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """One run of the demo, small; its JSON and where it worked."""
    work_dir = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        # As tight as the whole demo: a device that holds one conversation, a host that holds less than half of them.
        patch.setattr(demo, "DEVICE_BLOCKS", 130)
        patch.setattr(demo, "HOST_BLOCKS", 240)
        patch.setattr(demo, "MODEL", {**demo.MODEL, "hidden_size": 64, "intermediate_size": 128})
        printed = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        exit_code = demo.run_demo(work_dir, as_json=True, plot=work_dir / "p.svg", conversations=CONVERSATIONS)
    return exit_code, json.loads(printed[0]), work_dir


def test_all_four_ways_generate_the_same_tokens(shown):
    exit_code, said, _ = shown
    assert (exit_code, said["problems"]) == (0, [])
    assert [way["name"] for way in said["ways"]] == ["device", "+ host", "+ files", "restart"]
    assert all(way["requests"] == CONVERSATIONS * demo.TURNS for way in said["ways"])
    for verdict in said["tokens"].values():
        assert verdict["different"] == []
        assert verdict["equal"] + verdict["ties"] == CONVERSATIONS * demo.TURNS


def test_each_way_computes_less_than_the_one_before_it(shown):
    computed = [way["computed_tokens"] for way in shown[1]["ways"]]
    assert computed == sorted(computed, reverse=True)
    assert len(set(computed)) == 4
    assert computed[3] < computed[0] / 4
    restart = shown[1]["ways"][3]
    assert restart["loaded_tokens_from_0:files"] > restart["computed_tokens"]
    assert restart["first_token_p50_ratio"] == restart["first_token_p50_s"] / shown[1]["ways"][0]["first_token_p50_s"]


def test_the_whole_demo_is_larger_than_its_caches():
    whole = demo.Demo(demo.CONVERSATIONS, Console(quiet=True))
    assert whole.kv_blocks >= 4 * demo.DEVICE_BLOCKS
    assert whole.kv_blocks >= 2 * demo.HOST_BLOCKS
    lines = list(demo.workload())
    blocks = {tuple(line["prompt"][: 16 * (i + 1)]) for line in lines for i in range(len(line["prompt"]) // 16)}
    assert len(blocks) == whole.kv_blocks
    assert all(0 <= token < 251 for line in lines for token in line["prompt"])


def test_the_plot_is_a_picture_of_the_four_ways(shown):
    picture = ElementTree.parse(shown[2] / "p.svg")
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in ("device", "+ host", "+ files", "restart") if texts.count(name) >= 2] == [
        "device",
        "+ host",
        "+ files",
        "restart",
    ]
    assert any(re.fullmatch(r"[\d.]+ ms", text) for text in texts)


def test_a_picture_of_nothing_computed_is_still_one():
    ElementTree.fromstring(chart({"a": {"computed_tokens": 0, "device_hit_tokens": 0, "first_token_p50_s": None}}))


@pytest.fixture
def ended():
    """A demo that has run, to be changed: two requests, both as they should be."""
    it = demo.Demo(1, Console(quiet=True))
    for name in ("device", "+ host", "+ files", "restart"):
        figures = {"computed_tokens": 100, "first_token_p50_s": 1.0, "total_s": 1.0}
        if name == "restart":
            figures |= {"computed_tokens": 24, "loaded_tokens_from_0:files": 1, "loaded_tokens_from_host": 5}
        it.runs[name] = {"with_offload": figures, "without_offload": None}
        it.tokens[name] = {f"0.{turn}": (1, 2) for turn in range(demo.TURNS)}
    assert it.problems() == []
    return it


def test_a_missing_request_or_an_early_end_fails(ended):
    del ended.tokens["+ host"]["0.1"]
    ended.tokens["restart"]["0.2"] = (1,)
    assert ended.problems() == [
        f"{name}: the tokens of the first way were not generated" for name in ("+ host", "restart")
    ]


def test_a_restart_that_loads_nothing_or_computes_much_fails(ended):
    figures = ended.runs["restart"]["with_offload"]
    figures["loaded_tokens_from_0:files"] = 0
    assert ended.problems() == ["restart: nothing was loaded from the files that were left"]
    figures |= {"loaded_tokens_from_0:files": 1, "computed_tokens": 25}
    assert "25 tokens were computed, expected less than a quarter of the 100" in ended.problems()[0]


def test_a_way_without_a_result_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "MODEL", {**demo.MODEL, "max_position_embeddings": 64})  # too few for any prompt
    assert demo.run_demo(tmp_path, conversations=1) == 1
    assert "FAILED: device: its process ended with exit code 2 and no result" in capsys.readouterr().out


@pytest.mark.parametrize(("signum", "keeps"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_stops_the_demo_and_its_process_and_leaves_only_what_was_asked_for(tmp_path, signum, keeps):
    options = ("--work-dir", tmp_path / "work") if keeps else ()
    said = rb"without offload: [1-9]\d* of"
    code, out = stopped(signum, said, tmp_path, "demo", *options, has_temporary=not keeps)
    assert (code, out.splitlines()[-1]) == (130, "stopped")
    assert "FAILED" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--work-dir", "{dir}/file"], "--work-dir {dir}/file: cannot be used: "),
        (["--work-dir", "{dir}/file/below"], "--work-dir {dir}/file/below: cannot be used: "),
        (["--work-dir", "/proc/nope"], "--work-dir /proc/nope: cannot be used: "),
        (["--work-dir", "{dir}/used"], "--work-dir {dir}/used: found the store of an earlier demo, expected none"),
        (["--plot", "{dir}/p.png"], "--plot {dir}/p.png: found .png, expected .svg"),
        (["--plot", "{dir}/no/p.svg"], "--plot {dir}/no/p.svg: cannot be written: No such"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(tmp_path, arguments, says, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "used" / "store").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["orlop", "demo", *(a.format(dir=tmp_path) for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("orlop: " + says.format(dir=tmp_path))
