"""What a capture does beside capturing; the capture itself is a GPU's test."""

import gc

import pytest

from gradwire.engine.cuda_graphs import _nothing_freed


def test_the_garbage_collector_rests_meanwhile() -> None:
    assert gc.isenabled()
    with _nothing_freed():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_garbage_collector_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), _nothing_freed():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with _nothing_freed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
