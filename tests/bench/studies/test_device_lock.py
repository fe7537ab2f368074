"""The device lock: many processes share it, and one that wants it exclusively gets it."""

import threading
import time
from pathlib import Path

import pytest

from deadlines import scaled
from gradwire.bench.studies import device_lock
from gradwire.bench.studies.device_lock import DeviceLock


def test_many_processes_hold_the_shared_lock(tmp_path: Path) -> None:
    first, second = DeviceLock(tmp_path, "cpu"), DeviceLock(tmp_path, "cpu")
    with first.shared(), second.shared():
        pass


def test_the_exclusive_lock_is_exclusive(tmp_path: Path) -> None:
    done: list[str] = []
    inside, wanted = threading.Event(), threading.Event()

    def trainer() -> None:
        device_lock = DeviceLock(tmp_path, "cpu")
        with device_lock.shared():
            inside.set()
            wanted.wait(scaled(10))
            done.append("step")
        with device_lock.shared():
            done.append("next step")

    thread = threading.Thread(target=trainer)
    thread.start()
    inside.wait(scaled(10))
    device_lock = DeviceLock(tmp_path, "cpu")
    wanted.set()
    with device_lock.exclusive():
        done.append("measured")
        thread.join(0.2)
        assert thread.is_alive() == ("next step" not in done)
        assert done in (["step", "measured"], ["step", "next step", "measured"])
    thread.join(scaled(10))
    assert sorted(done) == ["measured", "next step", "step"]


def test_a_shared_holder_can_take_the_exclusive_lock(tmp_path: Path) -> None:
    """Two processes do so at the same time, which must not deadlock."""
    measured: list[int] = []
    both = threading.Barrier(2)

    def work(number: int) -> None:
        device_lock = DeviceLock(tmp_path, "cpu")
        with device_lock.shared():
            both.wait(scaled(10))
            for _ in range(3):
                with device_lock.exclusive():
                    measured.append(number)
                    measured.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(10))
    assert len(measured) == 12
    # No other process held the lock during a measurement.
    assert all(a == b for a, b in zip(measured[::2], measured[1::2], strict=True))


def test_others_continue_while_one_holds_the_lock_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "WAIT_S", 0.02)
    monkeypatch.setattr(device_lock, "RETRY_S", 0.02)
    compiles, measured = DeviceLock(tmp_path, "cpu"), threading.Event()

    def measure() -> None:
        with DeviceLock(tmp_path, "cpu").exclusive():
            measured.set()

    thread = threading.Thread(target=measure)
    with compiles.shared():
        thread.start()
        other = DeviceLock(tmp_path, "cpu")
        for _ in range(5):
            with other.shared():
                time.sleep(0.01)
        assert not measured.is_set()
    thread.join(scaled(10))
    assert measured.is_set()
