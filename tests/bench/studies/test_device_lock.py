"""A room: many work in it at once, and who wants to be alone gets to be."""

import threading
import time
from pathlib import Path

import pytest

from gradwire.bench.studies import device_lock
from gradwire.bench.studies.device_lock import Room


def test_many_are_inside_at_once(tmp_path: Path) -> None:
    first, second = Room(tmp_path, "cpu"), Room(tmp_path, "cpu")
    with first.shared(), second.shared():
        pass


def test_who_is_alone_is_alone(tmp_path: Path) -> None:
    done: list[str] = []
    inside, wanted = threading.Event(), threading.Event()

    def trainer() -> None:
        room = Room(tmp_path, "cpu")
        with room.shared():
            inside.set()
            wanted.wait(10)
            done.append("step")
        with room.shared():
            done.append("next step")

    thread = threading.Thread(target=trainer)
    thread.start()
    inside.wait(10)
    room = Room(tmp_path, "cpu")
    wanted.set()
    with room.alone():
        done.append("measured")
        thread.join(0.2)
        assert thread.is_alive() == ("next step" not in done)
        assert done in (["step", "measured"], ["step", "next step", "measured"])
    thread.join(10)
    assert sorted(done) == ["measured", "next step", "step"]


def test_shared_work_may_stop_to_measure(tmp_path: Path) -> None:
    """Two do so at the same time, which must not be a deadlock."""
    measured: list[int] = []
    both = threading.Barrier(2)

    def work(number: int) -> None:
        room = Room(tmp_path, "cpu")
        with room.shared():
            both.wait(10)
            for _ in range(3):
                with room.alone():
                    measured.append(number)
                    measured.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(measured) == 12
    # Nobody was there while another measured.
    assert all(a == b for a, b in zip(measured[::2], measured[1::2], strict=True))


def test_others_go_on_while_one_is_in_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "PATIENCE_S", 0.02)
    monkeypatch.setattr(device_lock, "AWAY_S", 0.02)
    compiles, measured = Room(tmp_path, "cpu"), threading.Event()

    def measure() -> None:
        with Room(tmp_path, "cpu").alone():
            measured.set()

    thread = threading.Thread(target=measure)
    with compiles.shared():
        thread.start()
        other = Room(tmp_path, "cpu")
        for _ in range(5):
            with other.shared():
                time.sleep(0.01)
        assert not measured.is_set()
    thread.join(10)
    assert measured.is_set()
