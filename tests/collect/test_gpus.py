from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from hangdoctor.collect import Observer
from hangdoctor.model import Gpu, GpuProcess, Gpus, Missing

DUE = frozenset({"gpus"})


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Return the file that says what the cards say; the real binding loads a library of ours."""
    subprocess.run(
        [
            "cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1",
            "-o", tmp_path / "libnvidia-ml.so.1", Path(__file__).parent / "nvml_stub.c",
        ],
        check=True,
    )  # fmt: skip
    state = tmp_path / "cards"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("NVML_STUB", str(state))
    return state


def take(observer):
    return observer.take(DUE, at_s=0, wall_s=0).gpus


def test_eight_cards_are_read_and_a_lost_one_is_missing(driver):
    lines = [f"{10 * index} 1 {100 + index} 118400 0 0 {4700 + index}" for index in range(8)]
    lines[5] = "0 0 0 0 15 0 0"
    driver.write_text("\n".join(lines))
    with Observer([]) as observer:
        gpus = take(observer)
        assert isinstance(gpus, Gpus)
        assert gpus.driver == "575.0.stub"
        assert sorted(gpus.cards) == list(range(8))
        assert gpus.cards[3] == Gpu(
            index=3,
            name="NVIDIA Stub",
            util_pct=30,
            memory_util_pct=1,
            memory_used_bytes=103 << 20,
            memory_total_bytes=1000 << 20,
            power_w=118.4,
            processes=(GpuProcess(pid=4703, used_bytes=103 << 20),),
        )
        lost = gpus.cards[5]
        assert isinstance(lost, Missing)
        assert lost.reason == "gone"
        assert "GPU is lost" in lost.detail
        driver.write_text("\n".join(["7 0 5 90000 0 0 0"] * 8))
        found = take(observer).cards[5]
    assert (found.util_pct, found.processes) == (7, ())


def test_a_slow_driver_is_given_up_at_the_deadline_and_asked_again_later(driver):
    driver.write_text("1 1 1 1 0 0 0\n")
    with Observer([]) as observer:
        assert isinstance(take(observer), Gpus)
        worker = observer._workers["gpus"]
        patient = worker.job
        worker.job = msgspec.structs.replace(patient, deadline_s=0.3)
        driver.write_text("1 1 1 1 0 3600000 0\n")
        missing = take(observer)
        assert missing.reason == "timeout"
        worker.job = patient
        driver.write_text("2 1 1 1 0 0 0\n")
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
