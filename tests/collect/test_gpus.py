from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import nvml
import pytest
from nvml import card

from hangdoctor.collect import Observer
from hangdoctor.collect.gpus import MOST_XIDS
from hangdoctor.model import Gpu, GpuProcess, Gpus, Missing

DUE = frozenset({"gpus"})
BLACKWELL = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
NOBODY = 4_000_000
"""Above the greatest PID that Linux gives by default on a machine of less than 128 cores."""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Return the file that says what the cards say; the real binding loads a library of ours."""
    for name, value in nvml.build(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cards"


def take(observer):
    return observer.take(DUE, at_s=0, wall_s=0).gpus


def test_eight_cards_are_read_and_a_lost_one_is_missing(driver):
    lines = [
        card(
            (NOBODY + index, 103), busy=10 * index, memory_busy=1, used=203, milliwatts=118400,
            limit=600000, received=index, sent=2, linked=3, reasons=0x84, ecc=index,
        )
        for index in range(8)
    ]  # fmt: skip
    lines[5] = card(error=15)
    driver.write_text("".join(lines))
    with Observer([]) as observer:
        gpus = take(observer)
        assert isinstance(gpus, Gpus)
        assert gpus.driver == "575.0.stub"
        assert sorted(gpus.cards) == list(range(8))
        assert gpus.cards[3] == Gpu(
            index=3,
            name=BLACKWELL,
            bus="00000000:13:00.0",
            util_pct=30,
            memory_util_pct=1,
            memory_used_bytes=203 << 20,
            memory_total_bytes=97887 << 20,
            power_w=118.4,
            power_limit_w=600.0,
            temperature_c=35,
            slowed_by=("power cap", "power brake"),
            pcie_received_bytes=3,
            pcie_sent_bytes=2,
            nvlink_received_bytes=3 << 10,
            nvlink_sent_bytes=3 << 10,
            uncorrected_errors=3,
            xids=(),
            processes=(GpuProcess(pid=NOBODY + 3, used_bytes=103 << 20, name=""),),
        )
        lost = gpus.cards[5]
        assert isinstance(lost, Missing)
        assert lost.reason == "gone"
        assert "GPU is lost" in lost.detail
        driver.write_text(card(busy=7, used=5) * 8)
        found = take(observer).cards[5]
    assert (found.util_pct, found.processes) == (7, ())


def test_what_an_older_driver_lacks_is_none_and_all_else_is_read(tmp_path, monkeypatch):
    for name, value in nvml.build(tmp_path, "-DOLD").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cards").write_text(card((NOBODY, 5), busy=7, used=9, received=1, xid=79))
    with Observer([]) as observer:
        found = take(observer).cards[0]
    assert (found.util_pct, found.memory_used_bytes, len(found.processes)) == (7, 9 << 20, 1)
    assert (
        found.slowed_by, found.pcie_received_bytes, found.pcie_received_per_s,
        found.uncorrected_errors, found.xids, found.temperature_c,
    ) == (None,) * 6  # fmt: skip


def test_faults_that_the_driver_tells_add_up_and_are_bounded(driver):
    with Observer([]) as observer:
        driver.write_text(card() + card())
        assert [gpu.xids for gpu in take(observer).cards.values()] == [(), ()]
        for number in range(1, MOST_XIDS + 5):
            driver.write_text(card() + card(xid=number))
            gpus = take(observer)
        driver.write_text(card() + card())
        gpus = take(observer)
    assert gpus.cards[0].xids == ()
    assert gpus.cards[1].xids == tuple(range(1, MOST_XIDS + 1))


@pytest.mark.parametrize(
    ("said", "detail"), [({"mig": 1}, "split by MIG"), ({"virtual": 2}, "a virtual one")]
)
def test_a_part_of_a_card_is_missing_where_nothing_tells_what_it_does(said, detail, driver):
    driver.write_text(card(blind=1, **said) + card(**said))
    with Observer([]) as observer:
        cards = take(observer).cards
    assert (cards[0].reason, detail in cards[0].detail) == ("unsupported", True)
    assert isinstance(cards[1], Gpu)


def test_traffic_is_sampled_now_and_then_of_one_card_a_look_where_there_are_no_counters(driver):
    driver.write_text(card(throughput=2000) + card(throughput=3000))
    with Observer([]) as observer:
        rates = [[gpu.pcie_received_per_s for gpu in take(observer).cards.values()]
                 for _ in range(3)]  # fmt: skip
    assert rates == [[2000 * 1024.0, None], [None, 3000 * 1024.0], [None, None]]


def test_traffic_is_not_sampled_where_there_are_counters(driver):
    """A sample takes 21 ms a card."""
    driver.write_text(card(throughput=2000, received=1, sent=2) * 8)
    with Observer([]) as observer:
        cards = [gpu for _ in range(9) for gpu in take(observer).cards.values()]
    assert {gpu.pcie_received_per_s for gpu in cards} == {None}


def test_strangers_on_a_card_are_named_and_one_that_is_gone_has_no_name(driver):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        driver.write_text(card((child.pid, 5), (os.getpid(), 6), (NOBODY, 7)))
        with Observer([child.pid]) as observer:
            processes = take(observer).cards[0].processes
    finally:
        child.communicate()
    ours, stranger, gone = processes
    assert (ours.name, gone.name) == (None, "")
    assert stranger.name


def test_a_process_that_only_draws_holds_memory_of_the_card_too(driver):
    driver.write_text(card((NOBODY, 5), draws=f"{NOBODY + 1}:6") + card((7, 7), draws="7:8"))
    with Observer([]) as observer:
        cards = take(observer).cards
    held = [{one.pid: one.used_bytes >> 20 for one in gpu.processes} for gpu in cards.values()]
    assert held == [{NOBODY: 5, NOBODY + 1: 6}, {7: 7}]


def test_processes_that_may_not_be_seen_are_not_known(driver):
    driver.write_text(card((NOBODY, 5), busy=7, sealed=1))
    with Observer([]) as observer:
        found = take(observer).cards[0]
    assert (found.processes, found.util_pct) == (None, 7)


def test_open_device_files_tell_the_card_where_the_pids_are_another_namespaces(driver, tmp_path):
    proc = tmp_path / "proc"
    for pid, own in ((710, 0), (711, 1)):
        (proc / str(pid) / "fd").mkdir(parents=True)
        for number in range(24):
            index = own if number < 20 else 1 - own
            (proc / str(pid) / "fd" / str(number)).symlink_to(f"/dev/nvidia{index}")
        (proc / str(pid) / "fd" / "99").symlink_to("/dev/nvidiactl")
        (proc / str(pid) / "stat").write_text(
            f"{pid} (python3) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0" + " 0" * 28
        )
    driver.write_text(card((NOBODY, 5)) + card((NOBODY + 1, 5)))
    with Observer([710, 711], proc=proc) as observer:
        cards = take(observer).cards
    assert [gpu.opened_by for gpu in cards.values()] == [{710: 20, 711: 4}, {710: 4, 711: 20}]


def test_a_slow_driver_is_given_up_at_the_deadline_and_asked_again_later(driver):
    driver.write_text(card(busy=1))
    with Observer([]) as observer:
        assert isinstance(take(observer), Gpus)
        worker = observer._workers["gpus"]
        patient = worker.job
        worker.job = msgspec.structs.replace(patient, deadline_s=0.3)
        driver.write_text(card(wait=3600000))
        missing = take(observer)
        assert missing.reason == "timeout"
        worker.job = patient
        driver.write_text(card(busy=2))
        assert take(observer).cards[0].util_pct == 2


def test_a_library_without_a_driver_says_so(driver):
    assert not driver.exists()
    with Observer([]) as observer:
        missing = take(observer)
    assert missing.reason == "not-installed"
    assert "Driver" in missing.detail


def test_a_machine_without_the_library_says_so(tmp_path, monkeypatch):
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with Observer([]) as observer:
        missing = take(observer)
    assert missing.reason == "not-installed"
    assert "libnvidia-ml.so.1" in missing.detail
    assert missing.hint
