"""CUDA graph capture: the garbage collector is disabled meanwhile. GPU tests do the capture."""

import gc

import pytest

from gradwire.engine.cuda_graphs import _without_gc


def test_the_garbage_collector_is_disabled_meanwhile() -> None:
    assert gc.isenabled()
    with _without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_garbage_collector_is_enabled_again_after_an_error() -> None:
    with pytest.raises(KeyError), _without_gc():
        raise KeyError
    assert gc.isenabled()


def test_a_disabled_garbage_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with _without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
