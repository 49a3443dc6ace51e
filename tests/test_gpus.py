"""What the cards show: readings from numbers measured on an H200, and the rules over them."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import scenarios as told
from scenarios import Does, good_log, launch

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.gpus import cards_of, moves_data_of, others_only, see_card, work_of
from hangdoctor.model import Gpu, GpuProcess, Missing
from hangdoctor.render.text import to_text

SGLANG = engines.load("sglang")
replace = msgspec.structs.replace
OWN, STRANGER = 710, 4711
GIB = 1 << 30
MB = 10**6
LOST = Missing(reason="gone", detail="GPU 1 is lost: GPU is lost", hint="reset it")
LOADS = {"TP0": Does(stack=told.BARRIER), "TP1": Does(stack=told.LOADING, cpu_pct=0)}


def seen(*looks, idle_w=121.0, **more):
    """Return a card after some seconds of idling with a context, and then these looks."""
    idle = {"util_pct": 0, "memory_util_pct": 0, "power_w": idle_w}
    card, received, sent = None, 0, 0
    for at_s, given in enumerate((*[idle] * 5, *looks)):
        look = dict(given)
        received += look.pop("receives", 0)
        sent += look.pop("sends", 0)
        gpu = {
            "index": 0,
            "memory_used_bytes": 2 * GIB,
            "power_limit_w": 700.0,
            "pcie_received_bytes": received % (1 << 32),
            "pcie_sent_bytes": sent % (1 << 32),
            "processes": (GpuProcess(OWN, 2 * GIB),),
        }
        card = see_card(card, Gpu(**gpu | more | look), float(at_s), {OWN})
    return card


MEASURED = {
    "idle": ((0, 0, 121.4), {"receives": 100_000, "sends": 400_000}, "idle", False),
    "one kernel that spins on memory of the card": (
        (100, 0, 121.6), {"receives": 100_000}, "spinning", False,
    ),
    "a full grid of them": ((100, 0, 134.3), {"receives": 200_000}, "spinning", False),
    "kernels that spin on memory of the host": (
        (100, 0, 121.9), {"receives": 59 * MB, "sends": 31 * MB}, "spinning", False,
    ),
    "the same, and twice as fast": (
        (100, 0, 121.9), {"receives": 118 * MB, "sends": 60 * MB}, "copying", False,
    ),
    "copies at full rate from pinned memory": (
        (100, 2, 128.0), {"receives": 963 * MB, "sends": 297 * MB}, "copying", True,
    ),
    "copies of 160 MB/s from pageable memory": (
        (0, 0, 121.4), {"receives": 180 * MB, "sends": 16 * MB}, "copying", True,
    ),
    "copies to another card": ((83, 1, 127.7), {"receives": 22 * MB, "sends": 650 * MB},
                               "copying", True),
    "a decode": ((90, 40, 480.0), {"receives": 5 * MB}, "computing", True),
    "a decode that offloads": ((90, 40, 480.0), {"receives": 800 * MB}, "computing", True),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_a_card_reads_as_what_it_was_seen_to_do(name):
    (util, memory, power), traffic, reading, moves = MEASURED[name]
    look = {"util_pct": util, "memory_util_pct": memory, "power_w": power} | traffic
    card = seen(look, look)
    assert card.reading == reading
    assert bool(moves_data_of(card, {OWN}, 6.0)) is moves


def test_a_counter_of_32_bits_that_wraps_is_no_negative_rate():
    busy = {"util_pct": 0, "memory_util_pct": 0, "power_w": 121.0, "receives": (1 << 32) - 5}
    card = seen(busy, busy | {"receives": 300 * MB})
    assert card.received_per_s == 300 * MB


def test_counters_that_are_not_there_leave_the_reading_to_power_and_memory():
    none = {"pcie_received_bytes": None, "pcie_sent_bytes": None}
    spin = {"util_pct": 100, "memory_util_pct": 0, "power_w": 122.0}
    assert seen(spin, **none).reading == "spinning"
    assert seen(spin, **none, pcie_received_per_s=2e9).reading == "copying"


def test_memory_that_another_tenant_takes_is_no_progress_of_ours():
    def grows(pid):
        card = None
        for at_s in range(3):
            size = (2 + at_s) * GIB
            processes = (GpuProcess(OWN, 2 * GIB), GpuProcess(STRANGER, size, "python3"))
            gpu = Gpu(index=0, util_pct=0, memory_used_bytes=2 * GIB + size, processes=processes)
            card = see_card(card, gpu, float(at_s), {pid})
        return moves_data_of(card, {pid}, 2.0)

    assert not grows(OWN)
    assert grows(STRANGER) == "memory of GPU 0 grows"
    # Whose processes the driver does not name may be behind any growth.
    assert grows(99) == "memory of GPU 0 grows"


@pytest.mark.parametrize(
    ("others", "used", "shared"),
    [
        ((GpuProcess(STRANGER, 22 << 20, "python3"),), 2 * GIB, True),
        ((GpuProcess(STRANGER, None, None),), 2 * GIB, True),  # hidden from us
        ((), 20 * GIB, True),  # another namespace's, which the driver does not name
        ((), 2 * GIB, False),
        ((GpuProcess(STRANGER, GIB, ""),), 3 * GIB, False),  # gone
        ((GpuProcess(STRANGER, GIB, "nvidia-cuda-mps-server"),), 3 * GIB, False),
    ],
)
def test_a_card_is_shared_where_others_may_work_on_it(others, used, shared):
    gpu = Gpu(
        index=0,
        util_pct=90,
        memory_util_pct=40,
        memory_used_bytes=used,
        processes=(GpuProcess(OWN, 2 * GIB), *others),
    )
    card = see_card(see_card(None, gpu, 0.0, {OWN}), gpu, 1.0, {OWN})
    assert (card.reading, card.shared) == ("computing", shared)
    assert work_of(card, 1.0) == "GPU 0 computes"
    assert moves_data_of(card, {OWN}, 1.0) == ("" if shared else "GPU 0 computes")
    alone = replace(gpu, processes=(GpuProcess(OWN, 2 * GIB),), memory_used_bytes=2 * GIB)
    assert see_card(card, alone, 2.0, {OWN}).shared is shared  # it may have ended in between


@pytest.mark.parametrize(
    ("opened", "mine"),
    [
        ([{OWN: 20, 711: 4}, {OWN: 4, 711: 20}], (0,)),
        ([{OWN: 4, 711: 4}, {OWN: 4, 711: 4}], ()),  # before it has a context
        ([{OWN: 20}, {OWN: 18}], ()),  # two that it may use
        ([{OWN: 20}, {}], (0,)),
        ([None, None], ()),
    ],
)
def test_the_card_of_a_rank_follows_from_the_device_files_it_holds(opened, mine):
    cards = {
        index: see_card(None, Gpu(index=index, processes=(), opened_by=counts), 0.0, {OWN})
        for index, counts in enumerate(opened)
    }
    assert cards_of(cards, {OWN}) == mine


@pytest.mark.parametrize(
    ("processes", "theirs"),
    [
        ((GpuProcess(STRANGER, GIB, "python3"),), True),
        ((), False),
        ((GpuProcess(STRANGER, GIB, None),), False),  # hidden, or another namespace's
        ((GpuProcess(STRANGER, GIB, ""),), False),  # as in a container
        ((GpuProcess(STRANGER, GIB, "nvidia-cuda-mps-server"),), False),
        ((GpuProcess(STRANGER, GIB, "python3"), GpuProcess(OWN, GIB)), False),
    ],
)
def test_a_card_that_only_others_are_seen_on_is_no_ranks(processes, theirs):
    card = see_card(None, Gpu(index=0, processes=processes), 0.0, {OWN})
    assert others_only(card, {OWN}) is theirs


def test_a_card_that_is_lost_is_still_its_ranks():
    card = see_card(seen(), LOST, 9.0, {OWN})
    assert (card.reading, cards_of({1: card}, {OWN})) == ("lost", (1,))


# The rules, over launches whose cards are changed


def told_with(tmp_path, change, ranks=LOADS, **options):
    """Return the facts and verdict of a load that stands still, with changed cards."""
    log = good_log(tuple(ranks), "load-end")
    recording = launch(tmp_path, ranks, log=log, seconds=options.pop("seconds", 100), **options)

    def changed(snapshot):
        if isinstance(snapshot.gpus, Missing):
            return snapshot
        return replace(snapshot, gpus=change(snapshot.gpus, snapshot.at_s))

    recording = replace(recording, snapshots=tuple(map(changed, recording.snapshots)))
    facts = derive(recording, SGLANG)
    return facts, diagnose(facts, SGLANG)


def with_card(index, **said):
    """Return a change of one card; a value may be a function of the time."""

    def change(gpus, at_s):
        if not isinstance(gpus.cards[index], Gpu):
            return gpus
        now = {key: value(at_s) if callable(value) else value for key, value in said.items()}
        return replace(gpus, cards=gpus.cards | {index: replace(gpus.cards[index], **now)})

    return change


def only(found, rule):
    return [finding for finding in found.findings if finding.rule == rule]


def processes_with(*others):
    """Return TP1's process and others."""
    return (GpuProcess(711, 2 * GIB), *others)


def test_a_lost_card_is_named_with_its_rank(tmp_path):
    def lose(gpus, at_s):
        return replace(gpus, cards=gpus.cards | {1: LOST}) if at_s >= 30 else gpus

    _, found = told_with(tmp_path, lose)
    (lost,) = only(found, "gpu-lost")
    assert (lost.title, lost.ranks) == ("GPU 1 is lost, on which TP1 ran", ("TP1",))
    assert found.state == "unknown"  # a card that cannot be asked may have shown progress


WORK = {"util_pct": 90, "memory_util_pct": 40, "power_w": 480.0}


def working(*others):
    """Return a change: the card of TP1 computes from 30 s on, its rank on it beside others."""

    def change(gpus, at_s):
        work = WORK if at_s >= 30 else {}
        return with_card(1, processes=processes_with(*others), **work)(gpus, at_s)

    return change


def test_what_others_do_on_a_card_is_no_progress_of_a_rank_that_sleeps(tmp_path):
    _, alone = told_with(tmp_path / "alone", working())
    assert alone.state == "starting"
    _, found = told_with(tmp_path, working(GpuProcess(STRANGER, GIB, "python3")))
    assert (found.state, found.culprits) == ("hung", ("TP1",))


@pytest.mark.parametrize(
    "does",
    [
        Does(stack=told.SYNC),
        Does(stack=told.LOADING, cpu_pct=0, kernel="poll_schedule_timeout"),  # a blocking wait
        Does(stack=told.LOADING, cpu_pct=60, state="R", kernel="0"),
    ],
)
def test_what_others_do_on_a_card_leaves_open_whether_a_rank_that_may_use_it_moves(does, tmp_path):
    others = working(GpuProcess(STRANGER, GIB, "python3"))
    _, found = told_with(tmp_path, others, {"TP0": does, "TP1": does}, seconds=200)
    assert found.state == "unknown"
    assert any("whose work GPU 1 did" in need for one in found.findings for need in one.needs)


def test_a_card_that_spins_for_others_holds_nobody_up(tmp_path):
    spins = {"util_pct": 100, "memory_util_pct": 0, "power_w": 122.0}

    def change(gpus, at_s):
        work = spins if at_s >= 30 else {}
        others = processes_with(GpuProcess(STRANGER, GIB, "python3"))
        return with_card(1, processes=others, **work)(gpus, at_s)

    _, found = told_with(tmp_path, change)
    (spinning,) = only(found, "gpu-spinning")
    assert spinning.title == "GPU 1 spins: busy, but at idle power"
    assert "not the launch alone is on it" in spinning.because[0].text
    assert (found.state, found.culprits) == ("hung", ("TP1",))


def test_cards_of_others_are_not_behind_a_rank_that_has_none_yet(tmp_path):
    def change(gpus, at_s):
        theirs = (GpuProcess(STRANGER, 9 * GIB, "python3"),)
        work = WORK if at_s >= 30 else {}
        cards = {
            index: replace(card, processes=theirs, **work) for index, card in gpus.cards.items()
        }
        return replace(gpus, cards=cards)

    _, found = told_with(tmp_path, change)
    assert (found.state, found.culprits) == ("hung", ("TP1",))


def test_a_driver_that_does_not_answer_is_a_finding_and_makes_nothing_surer(tmp_path):
    silent = Missing(reason="timeout", detail="no answer in 5 s")
    _, sure = told_with(tmp_path, lambda gpus, _: gpus)
    _, found = told_with(tmp_path, lambda gpus, at_s: silent if at_s >= 30 else gpus)
    assert not only(sure, "driver-does-not-answer")
    assert only(found, "driver-does-not-answer")
    assert (sure.state, found.state) == ("hung", "unknown")


@pytest.mark.parametrize(
    ("processes", "used", "words"),
    [
        (processes_with(), 2 * GIB, None),
        (processes_with(GpuProcess(STRANGER, 80 * 10**9, "python3")), 77 * GIB,
         "pid 4711 (python3), outside the launch, holds 80.0 GB"),
        (processes_with(GpuProcess(STRANGER, 10**6, "Xorg")), 2 * GIB, None),
        (processes_with(GpuProcess(STRANGER, 80 * 10**9, None)), 77 * GIB, None),
        (processes_with(GpuProcess(STRANGER, 80 * 10**9, "")), 77 * GIB, "no longer exists"),
        (processes_with(), 80 * GIB, "belong to no process that the driver names"),
        (processes_with(GpuProcess(STRANGER, None, "x")), 80 * GIB, None),
        # The driver's PIDs are another namespace's.
        ((GpuProcess(STRANGER, 80 * 10**9, ""),), 80 * GIB, None),
    ],
)  # fmt: skip
def test_who_else_holds_memory_of_a_card_is_named(processes, used, words, tmp_path):
    change = with_card(1, processes=processes, memory_used_bytes=used)
    _, found = told_with(tmp_path, change)
    shared = only(found, "gpu-shared")
    assert [words in one.title for one in shared] == ([True] if words else [])
    assert all(one.ranks == ("TP1",) for one in shared)
    assert (found.state, found.culprits) == ("hung", ("TP1",))


def test_a_full_card_is_named_and_one_with_some_memory_left_is_not(tmp_path):
    total = 140 * GIB
    for free, count in ((100 << 20, 1), (GIB, 0)):
        change = with_card(1, memory_used_bytes=total - free, memory_total_bytes=total)
        _, found = told_with(tmp_path, change)
        assert len(only(found, "gpu-memory-full")) == count


def test_a_card_that_is_slowed_by_heat_is_named_and_a_power_cap_is_not(tmp_path):
    for reasons, count in ((("power cap", "heat"), 1), (("power cap",), 0), ((), 0), (None, 0)):
        _, found = told_with(tmp_path, with_card(1, slowed_by=reasons, temperature_c=91))
        assert len(only(found, "gpu-slowed")) == count


def test_an_xid_that_nvml_tells_is_a_fault_and_one_that_both_tell_is_one(tmp_path):
    change = with_card(1, bus="00000000:1B:00.0", xids=lambda at_s: (79,) if at_s > 50 else ())
    _, found = told_with(tmp_path, change)
    (fault,) = only(found, "gpu-fault")
    assert (fault.title, fault.ranks) == ("the driver reported Xid 79 on GPU 1 of TP1", ("TP1",))


def test_memory_errors_count_from_the_first_look(tmp_path):
    for errors, count in ((7, 0), (lambda at_s: 7 + (at_s > 50), 1)):
        _, found = told_with(tmp_path, with_card(1, uncorrected_errors=errors))
        assert len(only(found, "gpu-fault")) == count


def test_a_load_that_only_copies_to_its_card_is_not_hung(tmp_path):
    traffic = partial(with_card, 1, pcie_sent_bytes=0)
    copies = traffic(pcie_received_bytes=lambda at_s: int(at_s * 180e6) % (1 << 32))
    polls = traffic(pcie_received_bytes=lambda at_s: int(at_s * 59e6) % (1 << 32))
    facts, found = told_with(tmp_path, copies)
    assert (found.state, facts.cards[1].reading) == ("starting", "copying")
    assert facts.rank("TP1").moved_by.startswith("GPU 1 copies 180 MB/s")
    _, found = told_with(tmp_path, polls)
    assert (found.state, found.culprits) == ("hung", ("TP1",))


@pytest.mark.parametrize(
    ("processes", "opened", "words"),
    [
        ((GpuProcess(STRANGER, GIB, ""),), None, "the driver's PIDs are of another namespace"),
        (None, None, "the driver names no processes"),
        ((GpuProcess(STRANGER, GIB, "python3"),), None, None),  # somebody else's cards
        ((), None, None),  # nobody uses them yet
        ((GpuProcess(STRANGER, GIB, ""),), {710: 20}, None),
        (None, {710: 20}, None),
    ],
)
def test_it_is_said_where_nothing_tells_whose_a_card_is(processes, opened, words, tmp_path):
    def change(gpus, _):
        cards = {
            index: replace(card, processes=processes, opened_by=opened if index == 0 else None)
            for index, card in gpus.cards.items()
        }
        return replace(gpus, cards=cards)

    facts, found = told_with(tmp_path, change)
    said = [one.missing.detail for one in found.unseen if one.what == "which GPU is whose"]
    assert [words in one for one in said] == ([True] if words else [])
    assert ("rank not known" in to_text(facts, found)) == bool(words)


EIGHT = tuple(f"TP{rank}" for rank in range(8))
SPIN, COMPUTES, IDLE = (100, 0, 4), (100, 40, 300), (0, 0, 0)


def spinning(tmp_path, *, command="python3 -m sglang.launch_server", names=EIGHT, **odd):
    """Return what is said of eight cards that all spin but the ones that are told of."""
    doing = {
        name: Does(stack=told.CAPTURE, gpu=odd.get(name.replace(" ", ""), SPIN)) for name in names
    }
    idle = {name: Does(stack=told.CAPTURE) for name in names}
    doing = {name: ((0.0, idle[name]), (40.0, does)) for name, does in doing.items()}
    log = good_log(names, "capture-end")
    recording = launch(tmp_path, doing, log=log, seconds=90, command=command)
    return only(diagnose(derive(recording, SGLANG), SGLANG), "gpu-spinning")


def test_on_all_but_one_of_eight_cards_the_idle_one_never_launched_its_part(tmp_path):
    (found,) = spinning(tmp_path, TP5=IDLE)
    assert found.title.endswith("busy, but at idle power; TP5 never launched its part")
    assert found.ranks == tuple(name for name in EIGHT if name != "TP5")
    assert (found.state, found.culprits) == (None, ())


def test_where_all_of_eight_cards_spin_nobody_is_named(tmp_path):
    (found,) = spinning(tmp_path)
    assert found.title == "GPU 0 to GPU 7 spin: busy, but at idle power"
    assert found.ranks == EIGHT


def test_a_card_that_computes_beside_those_that_spin_has_launched_its_part(tmp_path):
    (found,) = spinning(tmp_path, TP5=COMPUTES)
    assert "never launched" not in found.title


def test_an_idle_card_of_another_replica_is_not_waited_for(tmp_path):
    names = tuple(f"DP{replica} TP{rank}" for replica in range(2) for rank in range(4))
    idle = dict.fromkeys(("DP1TP0", "DP1TP1", "DP1TP2", "DP1TP3"), IDLE)
    command = "python3 -m sglang.launch_server --tp 4 --dp 2"
    (found,) = spinning(tmp_path, names=names, command=command, **idle)
    assert "never launched" not in found.title
    one_more = idle | {"DP0TP2": IDLE}
    (found,) = spinning(tmp_path / "again", names=names, command=command, **one_more)
    assert found.title.endswith("; DP0 TP2 never launched its part")
