"""Every engine file: it decodes, its patterns match their own examples, its ids are its own."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines
from hangdoctor.engines import PHASES, Engine, load, needle, normal_rank, rank_name, role_of
from hangdoctor.logs.arguments import arguments

SGLANG = load("sglang")


@pytest.mark.parametrize("name", engines.names())
def test_an_engine_file_decodes_and_has_every_phase_once_and_in_order(name):
    assert [phase.id for phase in load(name).phases] == list(PHASES)


@pytest.mark.parametrize("name", engines.names())
@pytest.mark.parametrize(
    "kind",
    [
        "roles",
        "milestones",
        "bars",
        "signs",
        "waits",
        "limits",
        "allocations",
        "compilers",
        "observers",
    ],
)
def test_ids_are_unique_within_their_kind(name, kind):
    ids = [entry.id for entry in getattr(load(name), kind)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", engines.names())
def test_a_limit_rests_on_waits_milestones_and_options_that_there_are(name):
    engine = load(name)
    for limit in engine.limits:
        assert set(limit.waits) <= {wait.id for wait in engine.waits}, limit.id
        begins = {limit.begins_with, *limit.begins_after} - {""}
        assert begins <= {milestone.id for milestone in engine.milestones}, limit.id
        assert {limit.option, *limit.not_with} - {""} <= set(engine.detect.sizes), limit.id
        assert limit.waits or limit.frames, limit.id
        assert limit.seen_in, limit.id


@pytest.mark.parametrize("name", engines.names())
def test_every_launchers_pattern_has_an_example(name):
    detect = load(name).detect
    for pattern in detect.launcher:
        assert any(re.search(pattern, example) for example in detect.launcher_examples), pattern


@pytest.mark.parametrize("name", engines.names())
def test_a_milestones_first_and_last_release_are_those_that_its_evidence_names(name):
    for milestone in load(name).milestones:
        for release in filter(None, (milestone.since, milestone.until)):
            assert release in milestone.seen_in, milestone.id


def test_arguments_that_decide_about_a_milestone_or_mean_nothing_are_arguments_of_a_release():
    known = set()
    for path in (Path(__file__).parents[2] / "sample_logs").glob("*.log"):
        for line in path.read_text(encoding="utf-8").splitlines():
            known |= arguments(line).keys() if "server_args=" in line else set()
    assert known >= {each for milestone in SGLANG.milestones for each in milestone.depends_on}
    assert known >= set(SGLANG.volatile)


def _patterns(engine: Engine):
    return [
        *engine.milestones,
        *engine.signs,
        *engine.bars,
        *engine.compilers,
        *engine.observers,
        *engine.allocations,
    ]


@pytest.mark.parametrize("name", engines.names())
def test_every_pattern_has_examples_matches_them_and_says_where_it_was_seen(name):
    for entry in _patterns(load(name)):
        assert entry.examples, entry.id
        assert entry.seen_in, entry.id
        for example in entry.examples:
            assert re.search(entry.pattern, example), (entry.id, example)
            assert needle(entry.pattern) in example


@pytest.mark.parametrize("name", engines.names())
def test_an_example_of_a_milestone_matches_no_other_milestone(name):
    for entry in load(name).milestones:
        for example in entry.examples:
            found = [m.id for m in load(name).milestones if re.search(m.pattern, example)]
            assert found == [entry.id]


@pytest.mark.parametrize("name", engines.names())
def test_an_example_of_a_sign_is_no_milestone(name):
    for entry in load(name).signs:
        for example in entry.examples:
            assert not any(re.search(m.pattern, example) for m in load(name).milestones), example


@pytest.mark.parametrize("name", engines.names())
def test_no_line_that_means_something_is_skipped_as_noise(name):
    engine = load(name)
    for entry in _patterns(engine):
        for example in entry.examples:
            line = f"[2026-11-29 21:04:27 TP0] {example}"
            assert not any(literal in line for literal in engine.skip), example


@pytest.mark.parametrize("name", engines.names())
def test_every_bar_names_done_and_total(name):
    for bar in load(name).bars:
        for example in bar.examples:
            match = re.search(bar.pattern, example)
            assert 0 <= int(match["done"]) <= int(match["total"])


@pytest.mark.parametrize("name", engines.names())
def test_the_title_of_every_role_is_known_as_that_role(name):
    engine = load(name)
    for role in engine.roles:
        assert role.examples, role.id
        for example in role.examples:
            assert role_of(engine, example).id == role.id, example


@pytest.mark.parametrize("name", engines.names())
def test_every_frame_is_a_file_and_a_function(name):
    engine = load(name)
    frames = [frame for phase in engine.phases for frame in phase.frames + phase.weak_frames]
    frames += [frame for wait in engine.waits for frame in wait.frames + wait.under]
    for frame in frames:
        assert re.fullmatch(r"[\w./-]+\.py:\w+", frame), frame


def test_waits_of_the_engine_stand_before_the_common_ones():
    ids = [wait.id for wait in SGLANG.waits]
    assert ids.index("post-load-barrier") < ids.index("monitored-barrier")
    assert ids.index("idle-broadcast") < ids.index("broadcast")


def test_a_misspelt_key_in_an_engine_file_is_an_error_that_names_it():
    raw = resources.files("hangdoctor.engines").joinpath("sglang.toml").read_text("utf-8")
    with pytest.raises(msgspec.ValidationError, match="norml_max_s"):
        msgspec.toml.decode(raw.replace("normal_max_s = 60", "norml_max_s = 60"), type=Engine)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("sglang::scheduler", "TP0"),
        ("sglang::scheduler_TP11", "TP11"),
        ("sglang::scheduler_DP1", "DP1"),
        ("sglang::scheduler_DP1_PP0_ATTN_CP0_MOE_DP2_TP3_EP1", "DP1 PP0 ATTN_CP0 MOE_DP2 TP3 EP1"),
    ],
)
def test_a_rank_is_named_after_its_title_as_the_log_names_it(title, name):
    role = role_of(SGLANG, title)
    assert rank_name(role, title) == name
    if name != "TP0":
        assert normal_rank(f" {name}") == name


def test_a_process_that_is_no_rank_has_no_rank_name():
    for title in ("sglang::detokenizer", "sglang::data_parallel_controller"):
        assert rank_name(role_of(SGLANG, title), title) is None


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m sglang.launch_server --model-path /models/x",
        "/usr/bin/python3 /usr/local/bin/sglang serve --model-path /models/x",
        "sglang serve --model-path /models/x",
        "python /opt/sglang/launch_server.py --model-path x",
        "python -m sglang.srt.entrypoints.http_server --model-path x",
    ],
)
def test_a_launcher_is_recognised_by_its_command(command):
    assert engines.matches_any(SGLANG.detect.launcher, command)
    assert role_of(SGLANG, command).id == "launcher"


@pytest.mark.parametrize(
    "command", ["vim launch_server_notes.md", "python -m vllm serve", "grep sglang x", "bash"]
)
def test_what_is_no_launcher_is_not_taken_for_one(command):
    assert not engines.matches_any(SGLANG.detect.launcher, command)


SHORT_FORM = (
    "python -m sglang.launch_server --tp 8 --pp-size=2 --dp-size 4 --ep 8 --nnodes 2 "
    "--node-rank 1 --enable-dp-attention"
)
LONG_FORM = (
    "python -m sglang.launch_server --tensor-parallel-size=8 --pipeline-parallel-size 2 "
    "--data-parallel-size 4 --expert-parallel-size 8 --nnodes=2 --node-rank=1 "
    "--enable-dp-attention"
)
REPR_FORM = (
    "server_args=ServerArgs(nnodes=2, node_rank=1, tp_size=8, pp_size=2, dp_size=4, ep_size=8, "
    "moe_dp_size=1, enable_dp_attention=True, device='cuda')"
)
DICTIONARY_FORM = (
    "server_args={'nnodes': 2, 'node_rank': 1, 'tp_size': 8, 'pp_size': 2, 'dp_size': 4, "
    "'ep_size': 8, 'moe_dp_size': 1, 'enable_dp_attention': True, 'device': 'cuda'}"
)


@pytest.mark.parametrize("text", [SHORT_FORM, LONG_FORM, REPR_FORM, DICTIONARY_FORM])
def test_sizes_are_read_from_every_form_of_the_arguments(text):
    sizes = {}
    for name, patterns in SGLANG.detect.sizes.items():
        match = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
        if match:
            sizes[name] = int(match[1]) if match.re.groups else 1
    expected = {"tp": 8, "pp": 2, "dp": 4, "ep": 8, "nnodes": 2, "node_rank": 1, "dp_attention": 1}
    assert sizes == expected
    assert not engines.matches_any(SGLANG.detect.cpu, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--dist-timeout 90 --watchdog-timeout=600 --soft-watchdog-timeout 60", (90, 600, False)),
        ("dist_timeout=None, watchdog_timeout=300, soft_watchdog_timeout=9", (None, 300, False)),
        ("{'dist_timeout': 90, 'watchdog_timeout': 300.0}", (90, 300, False)),
        ("--disaggregation-mode null --soft-watchdog-timeout 60", (None, None, False)),
        ("--disaggregation-mode prefill", (None, None, True)),
        ("disaggregation_mode='null', disaggregation_mode='decode'", (None, None, True)),
        ("{'disaggregation_mode': 'null'}", (None, None, False)),
    ],
)
def test_options_that_set_a_limit_are_read_from_every_form_of_the_arguments(text, expected):
    def number(name):
        patterns = SGLANG.detect.sizes[name]
        match = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
        return int(match[1]) if match else None

    other = engines.matches_any(SGLANG.detect.sizes["disaggregation"], text)
    assert (number("dist_timeout"), number("watchdog_timeout"), other) == expected


def test_dp_attention_that_is_off_is_not_read_as_on():
    text = "ServerArgs(tp_size=8, enable_dp_attention=False)"
    assert not engines.matches_any(SGLANG.detect.sizes["dp_attention"], text)
