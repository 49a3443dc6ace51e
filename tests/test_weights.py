"""The load of the weights: how fast, how long still, and whether storage has stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from looks import judged

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.facts.looks import next_looks
from hangdoctor.loads import report
from hangdoctor.model import Checkpoint, HeldFile, Missing, ShardFile, Weights
from hangdoctor.render.json import document
from hangdoctor.render.text import to_text
from hangdoctor.weights import pace, read_bytes, see_weights

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "recordings")]
import scenarios as told  # noqa: E402  # test material beside the tests
import transform  # noqa: E402
from scenarios import SHARD_BYTES, SHARDS, Does, good_log, launch  # noqa: E402

SGLANG = engines.load("sglang")
TOTAL_BYTES = SHARDS * SHARD_BYTES
LOG = good_log(("TP0", "TP1"), "load-end")
BEGAN_S = next(at_s for at_s, line in LOG if "Load weight begin" in line)
JOINS = Does(stack=told.DIST)
ASLEEP = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common")
BARRIER = Does(stack=told.BARRIER)
LOADS = Does(stack=told.MMAP)


def reads(bytes_per_s):
    return Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common", loads_per_s=bytes_per_s)


def loads(tmp_path, *parts, seconds, storage="fuse.slow", others=None, **more):
    """Return a launch of two ranks that join and then load, each part from its second on."""
    doing = ((0, JOINS), *((BEGAN_S + after_s, does) for after_s, does in parts))
    ranks = {"TP0": doing, "TP1": others or doing}
    return launch(
        tmp_path, ranks, log=LOG, seconds=BEGAN_S + seconds, storage=storage, gpus=True, **more
    )


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def prefixes(recording):
    return ((facts, found) for _, facts, found in judged(recording))


def rank_of(recording, name="TP1"):
    load = report(derive(recording, SGLANG), SGLANG)
    return next(rank for rank in load.ranks if rank.name == name)


def rules(found):
    return {finding.rule: finding for finding in found.findings}


def test_a_steady_load_tells_its_rate_and_the_time_that_is_left(tmp_path):
    rank = rank_of(loads(tmp_path, (0, reads(20e6)), seconds=20))
    assert rank.doing == "reading"
    assert rank.pace.per_s == pytest.approx(20e6, rel=0.15)
    left_s = (TOTAL_BYTES - 20e6 * 20) / 20e6
    now_s, least_s, most_s = rank.left_s
    assert now_s == pytest.approx(left_s, rel=0.3)
    assert least_s <= left_s <= most_s


@pytest.mark.parametrize(("before", "after"), [(40e6, 8e6), (8e6, 40e6)])
def test_a_rate_that_changes_midway_is_followed_within_20_s(before, after, tmp_path):
    recording = loads(tmp_path, (0, reads(before)), (60, reads(after)), seconds=80)
    rank = rank_of(recording)
    assert rank.pace.per_s == pytest.approx(after, rel=0.15)
    left_s = (TOTAL_BYTES - 60 * before - 20 * after) / after
    assert rank.left_s[0] == pytest.approx(left_s, rel=0.3)


def test_the_slowest_rank_decides_how_long_it_takes(tmp_path):
    slow = ((0, JOINS), (BEGAN_S, reads(5e6)))
    recording = loads(tmp_path, (0, reads(50e6)), seconds=40, others=slow)
    found = verdict(recording)
    assert rules(found)["weights-loading"].title.startswith("TP1, the slowest, reads 5.0 MB/s")
    load = document(derive(recording, SGLANG), found)["load"]
    assert load["slowest"] == "TP1"
    assert load["storage"] == "fuse.slow"
    assert load["total_bytes"] == TOTAL_BYTES
    assert [rank["doing"] for rank in load["ranks"]] == ["reading", "reading"]
    assert "at least" not in to_text(derive(recording, SGLANG), found)


def test_a_load_that_only_its_files_show_is_never_hung(tmp_path):
    found = list(prefixes(loads(tmp_path, (0, reads(2e6)), seconds=700)))
    assert "hung" not in {each.state for _, each in found}
    assert {each.state for facts, each in found if facts.at_s > BEGAN_S} == {"starting"}


def test_storage_that_delivered_steadily_and_stops_is_hung_within_a_minute(tmp_path):
    recording = loads(tmp_path, (0, reads(20e6)), (40, ASLEEP), seconds=100)
    found = verdict(recording)
    assert (found.state, found.phase, found.culprits) == ("hung", "weights", ())
    stalled = rules(found)["shard-stalled"]
    assert stalled.state == "hung"
    assert stalled.confidence == "medium"
    first = next(f.at_s for f, d in prefixes(recording) if d.state == "hung")
    assert 40 <= first - (BEGAN_S + 40) <= 60


def test_one_rank_whose_storage_stops_is_named_while_the_others_wait(tmp_path):
    stops = ((0, JOINS), (BEGAN_S, reads(20e6)), (BEGAN_S + 40, ASLEEP))
    recording = loads(tmp_path, (0, reads(250e6)), (40, BARRIER), seconds=100, others=stops)
    found = verdict(recording)
    assert (found.state, found.phase, found.culprits) == ("hung", "weights", ("TP1",))


@pytest.mark.parametrize("storage", ["nfs4", "lustre", ""])
def test_a_network_or_unknown_file_system_has_five_minutes_to_come_back(storage, tmp_path):
    recording = loads(tmp_path, (0, reads(20e6)), (40, ASLEEP), seconds=200, storage=storage)
    found = verdict(recording)
    assert found.state in ("starting", "unknown")
    assert "shard-stalled" not in [f.rule for f in found.findings if f.state == "hung"]


def test_a_load_that_was_bursty_before_is_given_ten_of_its_pauses(tmp_path):
    bursts = [
        (20.0 * n + 8 * k, reads(20e6) if k == 0 else ASLEEP) for n in range(6) for k in (0, 1)
    ]
    found = verdict(loads(tmp_path, *bursts, seconds=108 + 70))
    assert found.state in ("starting", "unknown")


def test_the_verdict_is_withdrawn_the_moment_a_shard_goes_on(tmp_path):
    recording = loads(tmp_path, (0, reads(20e6)), (40, ASLEEP), (130, reads(20e6)), seconds=140)
    states = [(facts.at_s - BEGAN_S, found) for facts, found in prefixes(recording)]
    assert any(found.state == "hung" for _, found in states)
    assert all(found.confidence != "high" for _, found in states if found.state == "hung")
    assert {found.state for at_s, found in states if at_s >= 133} == {"starting"}


def test_without_a_look_at_the_weights_the_same_stall_is_not_decided_yet(tmp_path):
    recording = loads(tmp_path, (0, reads(20e6)), (40, ASLEEP), seconds=100)
    full = verdict(recording)
    for section in ("processes", "stacks", "weights", "gpus", "log"):
        less = verdict(transform.drop_section(recording, section))
        transform.assert_no_surer(less, full, section)
    blind = verdict(transform.drop_section(recording, "weights"))
    assert blind.state != "hung"


def test_a_dropped_look_makes_a_stall_no_surer(tmp_path):
    recording = loads(tmp_path, (0, reads(20e6)), (40, ASLEEP), seconds=100)
    full = verdict(recording)
    for index in range(0, len(recording.snapshots), 7):
        transform.assert_no_surer(verdict(transform.drop_snapshot(recording, index)), full, index)


def test_a_full_bar_means_copying_and_a_stack_tells_of_post_processing(tmp_path):
    bar = "Loading safetensors checkpoint shards: 100% Completed | 10/10 [00:09<00:00,  1.0it/s]"
    log = [*LOG, (BEGAN_S + 10, bar)]
    copies = {"TP0": ((0, JOINS), (BEGAN_S, Does(stack=told.MMAP)))}
    recording = launch(tmp_path / "a", copies, log=log, seconds=BEGAN_S + 15, storage="ext4")
    assert rank_of(recording, "TP0").doing == "copying"
    stack = ("Fp8.process_weights_after_loading quantization/fp8.py:600", *told.MMAP)
    copies = {"TP0": ((0, JOINS), (BEGAN_S, Does(stack=stack)))}
    recording = launch(tmp_path / "b", copies, log=log, seconds=BEGAN_S + 15, storage="ext4")
    assert rank_of(recording, "TP0").doing == "post-processing"


def test_a_bar_that_jumps_to_its_end_is_no_stall(tmp_path):
    bars = [
        (BEGAN_S + at_s, f"Loading safetensors checkpoint shards: {n}% Completed | {n}/100 [x]")
        for at_s, n in ((1, 1), (35, 100))
    ]
    does = {"TP0": ((0, JOINS), (BEGAN_S, Does(stack=told.MMAP, cpu_pct=80)))}
    recording = launch(tmp_path, does, log=[*LOG, *bars], seconds=BEGAN_S + 60, storage="ext4")
    assert {found.state for _, found in prefixes(recording)} <= {"starting", "unknown"}


def test_looks_at_the_weights_are_made_while_ranks_load_and_no_oftener_than_they_cost(tmp_path):
    facts = derive(loads(tmp_path, (0, reads(2e6)), seconds=20), SGLANG)
    assert next_looks(facts)["weights"] == 2
    dear = msgspec.structs.replace(facts.loading, took_s=0.5)
    assert next_looks(msgspec.structs.replace(facts, loading=dear))["weights"] == 5
    ready = derive(
        launch(tmp_path / "b", {"TP0": Does(stack=told.RECEIVE)}, log=None, seconds=20), SGLANG
    )
    assert "weights" not in next_looks(ready)


def test_what_could_not_be_seen_of_the_weights_is_said(tmp_path):
    recording = loads(tmp_path, (0, reads(2e6)), seconds=20)
    refused = Missing(reason="permission", detail="Operation not permitted")
    snapshots = tuple(
        msgspec.structs.replace(
            each,
            weights=msgspec.structs.replace(
                each.weights, checkpoint=refused, held=dict.fromkeys(each.weights.held, refused)
            ),
        )
        if each.weights
        else each
        for each in recording.snapshots
    )
    found = verdict(msgspec.structs.replace(recording, snapshots=snapshots))
    unseen = {each.what for each in found.unseen}
    assert {"weights that TP0 reads", "the checkpoint"} <= unseen


def test_one_big_read_that_moves_no_offset_counts_by_the_memory_that_it_fills():
    loading, at_s = None, 0.0
    for number in range(3):  # three files, each read whole by one call of ten seconds
        for second in range(10):
            held = {7: (HeldFile(f"/m/{number}.safetensors", 100_000_000, 0, None),)}
            private = {7: 1_000_000_000 + second * 10_000_000}
            loading, _ = see_weights(loading, Weights(held=held), private, at_s)
            at_s += 1.0
    (rank,) = loading.ranks.values()
    assert read_bytes(rank) == 290_000_000
    assert pace(rank, at_s - 1).per_s == pytest.approx(10e6, rel=0.15)


def test_a_rank_that_only_sleeps_is_hung_without_full_confidence_before_150_s(tmp_path):
    sleeps = {"TP0": ((0, JOINS), (BEGAN_S, BARRIER)), "TP1": ((0, JOINS), (BEGAN_S, LOADS))}
    sure = {
        facts.at_s - BEGAN_S: found.confidence
        for facts, found in prefixes(launch(tmp_path, sleeps, log=LOG, seconds=BEGAN_S + 200))
        if found.state == "hung"
    }
    assert {word for at_s, word in sure.items() if at_s < 145} == {"medium"}
    assert {word for at_s, word in sure.items() if at_s > 165} == {"high"}


def whole_reads(seconds, *, visible):
    """Return what is seen of a process that reads a file of 100 MB by one call every ten seconds.

    Its memory shows that only where it asked the kernel for a new buffer.
    """
    loading = None
    for at_s in range(0, seconds, 2):
        number, part_s = divmod(at_s, 10)
        held = {7: (HeldFile(f"/m/{number}.safetensors", 100_000_000, 0, None),)}
        private = {7: 1_000_000_000 + (part_s * 10_000_000 if visible(number) else 0)}
        loading, _ = see_weights(loading, Weights(held=held), private, float(at_s))
    return loading.ranks[7], float(seconds - 2)


@pytest.mark.parametrize(
    "visible",
    [lambda _: True, lambda number: number < 2, lambda _: False],
    ids=["always", "at first", "never"],
)
def test_whole_reads_tell_their_rate_also_where_memory_is_used_anew(visible):
    for seconds in range(46, 58, 2):
        rank, at_s = whole_reads(seconds, visible=visible)
        assert pace(rank, at_s).per_s == pytest.approx(10e6, rel=0.15), seconds
        left_s = pace(rank, at_s).left_s(1e9 - read_bytes(rank))[0]
        assert left_s == pytest.approx((1e9 - 10e6 * at_s) / 10e6, rel=0.15), seconds


def test_a_file_that_is_read_unseen_for_far_too_long_has_no_rate():
    rank, at_s = whole_reads(50, visible=lambda _: False)
    assert pace(rank, at_s + 60) is None


def test_a_mapped_file_that_another_grows_after_counts_as_read():
    loading = None
    for at_s in range(0, 40, 2):
        number, part = divmod(at_s * 10_000_000, 100_000_000)
        held = [
            HeldFile(f"/m/{n}.safetensors", 125_000_000, None, 100_000_000) for n in range(number)
        ]
        held.append(HeldFile(f"/m/{number}.safetensors", 125_000_000, None, part))
        loading, _ = see_weights(loading, Weights(held={7: tuple(held)}), {}, float(at_s))
    (rank,) = loading.ranks.values()
    assert read_bytes(rank) == pytest.approx(3 * 125e6 + 0.8 * 125e6, rel=0.01)
    assert pace(rank, 38.0).per_s == pytest.approx(12.5e6, rel=0.1)


def downloads(tmp_path, *, bytes_per_s, total=60e9, seconds=60):
    """Return a launch whose ranks wait for the hub, and what is there of the model's files."""
    waits = {"TP0": ((0, JOINS), (BEGAN_S, Does(stack=told.HUB, kernel="ep_poll")))}
    recording = launch(tmp_path, waits, log=LOG, seconds=BEGAN_S + seconds, storage="ext4")

    def there(snapshot):
        at_s = snapshot.at_s - BEGAN_S
        if at_s < 0 or int(at_s) % 5:
            return msgspec.structs.replace(snapshot, weights=None)
        done, part = divmod(int(bytes_per_s * at_s), 5_000_000_000)
        blobs = "/hub/models--m/blobs"
        checkpoint = Checkpoint(
            directory="/hub/models--m/snapshots/1",
            files=tuple(ShardFile(f"{blobs}/{n}", 5_000_000_000) for n in range(done)),
            unfinished=(ShardFile(f"{blobs}/{done}.incomplete", part),),
            index_bytes=int(total),
        )
        return msgspec.structs.replace(snapshot, weights=Weights(checkpoint=checkpoint))

    return msgspec.structs.replace(recording, snapshots=tuple(map(there, recording.snapshots)))


def test_a_download_tells_its_rate_and_the_time_that_is_left(tmp_path):
    recording = downloads(tmp_path, bytes_per_s=200e6)
    found = verdict(recording)
    title = rules(found)["weights-loading"].title
    assert title.startswith(
        "the weights are being downloaded: they come at 200.0 MB/s, 12.0 GB are"
    )
    load = document(derive(recording, SGLANG), found)["load"]
    assert load["download"]["bytes_per_s"] == 200_000_000
    assert load["download"]["left_s"] == pytest.approx((60e9 - 12e9) / 200e6, rel=0.05)


def test_a_download_that_stands_still_has_no_rate(tmp_path):
    found = verdict(downloads(tmp_path, bytes_per_s=0))
    assert "have not been seen to come" in rules(found)["weights-loading"].title
    assert found.state in ("starting", "unknown")
