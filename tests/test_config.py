"""Settings: what is accepted, what is refused and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from orlop.config import (
    CHUNK_BYTES_WANTED,
    HostConfig,
    OrlopConfig,
    auto_blocks_per_chunk,
    default_host_bytes,
    parse_seconds,
    parse_size,
)
from orlop.core import KVGroup
from orlop.errors import ConfigError
from orlop.host.policies import BUILT_IN

FILES = {"type": "files", "path": "/cache", "bytes": "1GB"}


def load(mapping: Mapping[str, Any] | None = None, **environ: str) -> OrlopConfig:
    return OrlopConfig.load(mapping, environ=environ)


def refusal(mapping: Mapping[str, Any] | None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(mapping, **environ)
    return str(caught.value)


# --- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (1, 1),
        ("64", 64),
        ("64GB", 64 * 10**9),
        ("64GiB", 64 * 2**30),
        ("512 mib", 2**29),
        ("1.5kB", 1500),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_are_bytes_or_texts_with_a_unit(written: object, nbytes: int) -> None:
    assert parse_size(written) == nbytes


@pytest.mark.parametrize("written", [0, -1, 1.5, True, "", "GB", "64GX", "-1GB", "0.0001kB", None, [1], float("inf")])
def test_a_size_that_is_none_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="64GiB"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "seconds"), [(3, 3.0), (0, 0.0), ("200ms", 0.2), ("3s", 3.0), ("1.5", 1.5), ("5min", 300)]
)
def test_times_are_seconds_or_texts_with_a_unit(written: object, seconds: float) -> None:
    assert parse_seconds(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", [-1, "-1s", True, "soon", "3S", None, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="200ms"):
        parse_seconds(written)


# --- loading -----------------------------------------------------------------------------------------


def test_no_setting_at_all_is_a_host_tier_of_default_size() -> None:
    config = load()
    assert config == OrlopConfig()
    assert config.host == HostConfig(bytes=None, policy="lru", store_after=1)
    assert config.tiers == ()
    assert config.blocks_per_chunk is None
    assert (config.drain_deadline_s, config.store_deadline_s) == (3.0, 30.0)
    assert set(config.origins().values()) == {"default"}


def test_the_line_of_the_first_hour() -> None:
    config = load({"host": "64GB", "files": {"path": "/nvme/orlop", "bytes": "1TB"}})
    assert config.host.bytes == 64 * 10**9
    (tier,) = config.tiers
    assert (tier.type, tier.path, tier.bytes) == ("files", "/nvme/orlop", 10**12)
    assert (tier.deadline.lookup_s, tier.deadline.promotion_s, tier.deadline.cascade_s) == (0.2, 5.0, 30.0)
    assert (tier.write, tier.queue_bytes, tier.direct_io, tier.threads) == ("through", 2**28, "auto", 4)


def test_a_configuration_is_frozen_and_loading_leaves_its_input_alone() -> None:
    written = {"host": {"bytes": "1GB"}, "tiers": [dict(FILES)], "cpu_bytes_to_use": "1GB"}
    config = load(written, ORLOP_HOST_POLICY="mine:Policy", ORLOP_TIERS_0_BYTES="2GB")
    assert (config.host.policy, config.tiers[0].bytes) == ("mine:Policy", 2 * 10**9)
    assert written == {"host": {"bytes": "1GB"}, "tiers": [FILES], "cpu_bytes_to_use": "1GB"}
    with pytest.raises(Exception, match="frozen"):
        config.offload_decode = False  # type: ignore[misc]


def test_file_keys_carry_no_unit_and_attribute_names_are_no_file_keys() -> None:
    assert load({"drain_deadline": "500ms", "store_deadline": 7}).drain_deadline_s == 0.5
    assert "drain_deadline_s: found an unknown key (did you mean drain_deadline" in refusal({"drain_deadline_s": 1})


def test_every_problem_is_in_one_message_with_key_finding_and_what_is_allowed() -> None:
    message = refusal(
        {
            "hots": 1,
            "host": {"bytes": 0, "polcy": "lru"},
            "drain_deadline": -1,
            "offload_decode": "yes",
            "weights": "sampld",
            "tiers": [{"type": "valkey"}, {"type": "fils"}, {"type": "files", "path": "/a"}, {"path": "/b"}],
        },
        ORLOP_STORE_DEADLINE="soon",
        ORLOP_HOST_BYTE="1",
    )
    for part in (
        "config: 12 problems in the settings",
        "hots: found an unknown key (did you mean host?)",
        "host.bytes: found 0, allowed: a whole number of bytes above 0",
        "host.polcy: found an unknown key (did you mean policy?); allowed: bytes, policy, store_after",
        "drain_deadline: found -1, allowed: seconds from 0 up",
        "offload_decode: found 'yes', allowed: true or false",
        "weights: found 'sampld', allowed: 'sampled' or 'full' (did you mean sampled?)",
        "tiers.0.type: found 'valkey', allowed: disk, files, or 'module:Class'; the tier type 'valkey' is known but",
        "tiers.1.type: found 'fils', allowed: disk, files, or 'module:Class' (did you mean files?)",
        "tiers.2.bytes: found nothing, allowed: a bound like '1TB'",
        "tiers.3.type: found nothing, allowed: a value (required)",
        "store_deadline (from ORLOP_STORE_DEADLINE): found 'soon', allowed: seconds",
        "ORLOP_HOST_BYTE: found an unknown variable (did you mean ORLOP_HOST_BYTES",
    ):
        assert part in message


def test_what_is_refused_next_is_not_offered_as_allowed() -> None:
    message = refusal({"fils": FILES})
    assert (
        "(did you mean files?); allowed: blocks_per_chunk, disk, drain_deadline, events, files, hash, host," in message
    )
    assert not any(kind in refusal({"objcts": {}}) for kind in ("objects", "valkey"))


@pytest.mark.parametrize("kind", ["objects", "valkey"])
def test_a_tier_that_is_known_but_not_built_says_what_there_is(kind: str) -> None:
    assert f"{kind!r} is known but not there yet" in refusal({kind: {"path": "/a", "bytes": 1}})
    assert "allowed: disk, files" in refusal({"tiers": [{"type": kind}]})


@pytest.mark.parametrize("kind", ["disk", "files"])
def test_a_bound_too_small_is_refused_before_anything_starts(kind: str) -> None:
    assert "tiers.0.bytes: found '1MB', allowed: '1MiB' or more" in refusal({kind: {"path": "/a", "bytes": "1MB"}})
    assert "tiers.0.bytes: found nothing, allowed: a bound like '1TB'" in refusal({kind: {"path": "/a"}})
    assert load({"tiers": [{"type": "my.stores:Tape", "bytes": 1}]}).tiers[0].bytes == 1


def test_only_a_slab_can_sync() -> None:
    assert load({"disk": {"path": "/a", "bytes": "1GB", "sync": True}}).tiers[0].sync
    assert "tiers.0.sync: found True, allowed: false for type 'files'" in refusal({"tiers": [FILES | {"sync": True}]})


def test_a_class_of_the_users_own_is_accepted_as_tier_and_as_policy() -> None:
    config = load({"tiers": [{"type": "my.stores:Tape"}], "host": {"policy": "my.policies:Random"}})
    assert config.tiers[0].type == "my.stores:Tape"
    assert config.tiers[0].path is None
    assert config.host.policy == "my.policies:Random"


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_every_policy_is_one_for_host_memory_and_for_a_slab(policy: str) -> None:
    disk = {"type": "disk", "path": "/a", "bytes": "1GB", "policy": policy}
    config = load({"host": {"policy": policy}, "tiers": [disk]})
    assert (config.host.policy, config.tiers[0].policy) == (policy, policy)
    assert load({"eviction_policy": policy}).host.policy == policy
    if policy != "lru":
        assert "allowed: 'lru' for type 'files'" in refusal({"tiers": [FILES | {"policy": policy}]})


@pytest.mark.parametrize("write", ["through", "evicted", "off"])
def test_a_tier_is_written_at_once_on_eviction_or_never(write: str) -> None:
    assert load({"tiers": [FILES | {"write": write}]}).tiers[0].write == write


def test_another_time_of_writing_is_refused() -> None:
    assert "allowed: 'through', 'evicted' or 'off'" in refusal({"tiers": [FILES | {"write": "later"}]})


@pytest.mark.parametrize(("written", "meant"), [("~/x", "/homes/me/x"), ("~", "/homes/me"), ("./~/x", "./~/x")])
def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, written: str, meant: str) -> None:
    monkeypatch.setenv("HOME", "/homes/me")
    assert load({"tiers": [FILES | {"path": written}]}).tiers[0].path == meant
    assert load({"tiers": [FILES]}, ORLOP_TIERS_0_PATH=written).tiers[0].path == meant


def test_a_home_that_nobody_has_is_no_directory_name() -> None:
    assert "tiers.0.path: found '~nobody-has-this/x', allowed: a path; nobody's home" in refusal(
        {"tiers": [FILES | {"path": "~nobody-has-this/x"}]}
    )


@pytest.mark.parametrize("other", ["/cache", "/cache/", "/a/../cache", "~/cache"])
def test_two_tiers_in_one_directory_are_refused(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setenv("HOME", "/")
    assert "the path of tiers.0; allowed: one tier per directory" in refusal(
        {"tiers": [FILES, FILES | {"path": other}]}
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"host": []},
        {"host": {"bytes": True}},
        {"tiers": {"type": "files"}},
        {"tiers": ["files"]},
        {"tiers": [FILES | {"deadline": 3}]},
        {"tiers": [FILES | {"deadline": {"lookup": None}}]},
        {"tiers": [FILES | {"threads": 0}]},
        {"tiers": [FILES | {"queue_bytes": 0}]},
        {"tiers": [FILES | {"bytes": "1MB"}]},
        {"tiers": [FILES | {"path": ""}]},
        {"tiers": [FILES | {"path": 3}]},
        {"files": "/cache"},
        {"files": FILES, "tiers": []},
        {"blocks_per_chunk": 0},
        {"blocks_per_chunk": 2, "tokens_per_chunk": 32},
        {"weights_id": ""},
        {"hash": "md5"},
        {1: 2},
    ],
)
def test_what_can_never_work_is_one_error_of_ours(broken: dict[Any, Any]) -> None:
    assert "problem" in refusal(broken)


def test_settings_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="found list, allowed: a mapping"):
        OrlopConfig.load([], environ={})  # type: ignore[arg-type]


# --- the environment -----------------------------------------------------------------------------------


def test_variables_win_and_are_remembered_as_the_origin() -> None:
    config = load(
        {"host": {"bytes": "1GB"}, "offload_decode": True, "files": {"path": "/a", "bytes": "1MiB"}},
        ORLOP_HOST_BYTES="64GB",
        ORLOP_OFFLOAD_DECODE="false",
        ORLOP_BLOCKS_PER_CHUNK="4",
        ORLOP_WEIGHTS_ID="17",
        ORLOP_TIERS_0_DEADLINE_LOOKUP="50ms",
        HOME="/root",
    )
    assert config.host.bytes == 64 * 10**9
    assert config.offload_decode is False
    assert config.blocks_per_chunk == 4
    assert config.weights_id == "17"
    assert config.tiers[0].deadline.lookup_s == pytest.approx(0.05)
    origins = config.origins()
    assert origins["host.bytes"] == "ORLOP_HOST_BYTES"
    assert origins["tiers.0.deadline.lookup"] == "ORLOP_TIERS_0_DEADLINE_LOOKUP"
    assert origins["tiers.0.path"] == "config"
    assert origins["host.policy"] == "default"
    assert config.settings()["tiers.0.deadline.lookup"] == config.tiers[0].deadline.lookup_s
    assert config.settings().keys() == origins.keys()


def test_a_variable_for_a_tier_that_is_not_configured_is_unknown() -> None:
    assert "ORLOP_TIERS_0_BYTES: found an unknown variable" in refusal({}, ORLOP_TIERS_0_BYTES="1GB")


def test_the_process_environment_is_read_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORLOP_HOST_STORE_AFTER", "3")
    assert OrlopConfig.load({}).host.store_after == 3
    assert OrlopConfig.load({}, environ={}).host.store_after == 1


# --- vLLM's own keys -------------------------------------------------------------------------------------


def test_the_settings_of_vllms_own_connector_keep_their_meaning() -> None:
    config = load(
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8 * 10**9,
            "block_size": 128,
            "eviction_policy": "lru",
            "store_threshold": 2,
            "offload_prompt_only": True,
            "self_describing_kv_events": False,
            "secondary_tiers": [
                {"type": "fs", "root_dir": "/cache", "n_read_threads": 4, "n_write_threads": 2, "bytes": "1TB"}
            ],
        }
    )
    assert config.host == HostConfig(bytes=8 * 10**9, policy="lru", store_after=2)
    assert config.tokens_per_chunk == 128
    assert config.offload_decode is False
    (tier,) = config.tiers
    assert (tier.type, tier.path, tier.threads, tier.bytes) == ("files", "/cache", 6, 10**12)


def test_a_store_threshold_of_zero_means_at_once() -> None:
    assert load({"store_threshold": 0}).host.store_after == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"offload_prompt_only": True, "offload_decode": True}, "found beside offload_decode=True"),
        ({"cpu_bytes_to_use": 1, "host": {"bytes": 2}}, "found beside host.bytes=2"),
        ({"spec_name": "OtherSpec"}, "allowed: CPUOffloadingSpec, TieringOffloadingSpec"),
        ({"spec_module_path": "my.spec"}, "'type': 'module:Class'"),
        ({"cache_policy_module_path": "my.policy"}, "host: {'policy': 'module:Class'}"),
        ({"max_tracker_size": 64000}, "bounded by itself; leave it out"),
        ({"backpressure": {"alpha": 0.15}}, "queue_bytes"),
        ({"self_describing_kv_events": True}, "an event names each chunk"),
        ({"canonical_layout": True}, "one layout"),
        ({"offload_prompt_only": "yes"}, "write offload_decode"),
        ({"secondary_tiers": {}}, "write tiers"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/a"}]}, "here bytes is required: add 'bytes': '1TB'"),
        ({"secondary_tiers": [{"type": "obj", "store_config": {}}]}, "'objects' is known but not there yet"),
        ({"secondary_tiers": [{"type": "x", "module_path": "m", "class_name": "C"}]}, "with your chunk store"),
        ({"secondary_tiers": [], "tiers": [FILES]}, "found beside tiers"),
        ({"tiers": [FILES | {"type": "fs"}]}, "what vLLM's 'fs' is called here"),
        ({"tiers": [FILES | {"enable_kv_events": True}]}, "unknown key"),
    ],
)
def test_a_key_of_vllms_whose_meaning_is_not_kept_says_what_to_write(written: dict[str, Any], said: str) -> None:
    assert said in refusal(written)


# --- secrets ----------------------------------------------------------------------------------------------


@pytest.mark.fault("B130")
@pytest.mark.parametrize(
    "written",
    [
        {"secret_key": "hunter2"},
        {"password": "hunter2"},
        {"tiers": [FILES | {"session_token": "hunter2"}]},
        {"tiers": [FILES | {"store": {"secret_key": "hunter2"}}]},
        {"files": FILES | {"password": "hunter2"}},
        {"secondary_tiers": [{"type": "obj", "store_config": {"secret_key": "hunter2"}}]},
        {"secondary_tiers": {"secret_key": "hunter2"}},
        {"host": {"bytes": {"password": "hunter2"}}},
    ],
)
def test_a_secret_is_in_no_message(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written)
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__context__


def test_a_secret_is_in_no_message_of_direct_construction_either() -> None:
    with pytest.raises(ValidationError) as caught:
        OrlopConfig(password="hunter2")  # type: ignore[call-arg]
    assert "hunter2" not in str(caught.value)


# --- what waits for an engine that honours it ---------------------------------------------------------------


def test_what_no_engine_here_honours_is_refused_where_an_engine_joins() -> None:
    load({"hash": "sha256", "weights": "sampled"}).refuse_what_waits_for_an_engine()
    with pytest.raises(ConfigError) as caught:
        load({"weights": "full"}, ORLOP_HASH="blake3").refuse_what_waits_for_an_engine()
    for part in ("2 problems", "hash (from ORLOP_HASH): found 'blake3', allowed: 'sha256'", "weights: found 'full'"):
        assert part in str(caught.value)


# --- defaults of machine and engine -------------------------------------------------------------------------


def test_the_default_host_tier_is_a_quarter_of_memory_or_four_device_caches() -> None:
    assert default_host_bytes(10, 1000) == 40
    assert default_host_bytes(100, 1000) == 250


def test_the_default_host_tier_is_at_most_half_of_what_is_free_and_replicas_share_the_machine() -> None:
    assert default_host_bytes(100, 1000, 400) == 200
    assert default_host_bytes(100, 1000, 800) == 250
    assert default_host_bytes(100, 1000, 400, replicas=4) == 50
    assert default_host_bytes(100, 1000, None, replicas=4) == 62
    assert default_host_bytes(10, 1000, 400, replicas=4) == 40


@given(
    tokens=st.lists(st.sampled_from([1, 8, 16, 32, 48, 128, 256, 512]), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 1000),
    block_bytes=st.integers(1, 2**22),
)
def test_automatic_chunks_are_as_small_as_the_wanted_size_and_the_limits_allow(
    tokens: list[int], window: int | None, block_bytes: int
) -> None:
    groups = [KVGroup(i, n, window if i == 0 else None) for i, n in enumerate(tokens)]
    blocks = auto_blocks_per_chunk(groups, block_bytes)
    most = min(256, window or 256)
    possible = [n for n in (2**i for i in range(9)) if n == 1 or n * max(tokens) <= most]
    enough = [n for n in possible if n * block_bytes >= CHUNK_BYTES_WANTED]
    assert blocks == (enough[0] if enough else possible[-1])


def test_the_size_of_a_chunk_may_be_given_in_blocks_in_tokens_or_not_at_all() -> None:
    groups = [KVGroup(0, 16), KVGroup(1, 32)]
    assert load({"blocks_per_chunk": 3}).chunk_blocks(groups, 1) == 3
    assert load({"tokens_per_chunk": 64}).chunk_blocks(groups, 1) == 2
    assert load({"blocks_per_chunk": "auto"}).chunk_blocks(groups, 2**18) == 2
    with pytest.raises(ConfigError, match="found 40, allowed: a multiple of the engine's 32"):
        load({"tokens_per_chunk": 40}).chunk_blocks(groups, 1)


@pytest.mark.parametrize("found", [10**19, 10**400, "9" * 30, "9" * 400, "9" * 5000, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("drain_deadline", "s"),
        ("store_deadline", "h"),
        ("host", "GB"),
        ("host.store_after", ""),
        ("tiers.0.threads", ""),
    ]
    + [(f"tiers.0.deadline.{name}", "ms") for name in ("lookup", "promotion", "cascade")]
    + [("tiers.0.queue_bytes", "PiB"), ("tiers.0.bytes", ""), ("blocks_per_chunk", ""), ("tokens_per_chunk", "")],
)
def test_a_number_that_nothing_could_count_to_is_refused_by_name(key: str, unit: str, found: object) -> None:
    settings: dict[str, Any] = {"tiers": [dict(FILES)]}
    *way, last = key.split(".")
    here: Any = settings
    for part in way:
        here = here[int(part)] if part.isdigit() else here.setdefault(part, {})
    here[last] = f"{found}{unit}" if isinstance(found, str) else found
    assert f"{key}{'.bytes' if key == 'host' else ''}: found " in refusal(settings)


def test_threads_are_bounded() -> None:
    assert "tiers.0.threads: found 257, allowed: a whole number from 1 to 256" in refusal(
        {"tiers": [FILES | {"threads": 257}]}
    )


@pytest.mark.parametrize("written", [0, 0.0, "0s", "0"])
def test_a_wait_of_nothing_is_refused_where_it_would_turn_a_tier_off(written: object) -> None:
    """Elsewhere 0 often means "without a limit"; here it would mean that nothing is ever stored or found."""
    waits = {"lookup": written, "promotion": written, "cascade": written}
    message = refusal({"store_deadline": written, "tiers": [FILES | {"deadline": waits}]})
    for key in ("store_deadline", *(f"tiers.0.deadline.{name}" for name in waits)):
        assert f"{key}: found {written!r}, allowed: seconds above 0" in message
    assert load({"drain_deadline": written}).drain_deadline_s == 0


@pytest.mark.parametrize("path", ["a\0b", "/tmp/\ud800"])
def test_a_path_that_no_system_call_takes_is_refused(path: str) -> None:
    assert "tiers.0.path: found " in refusal({"tiers": [FILES | {"path": path}]})
