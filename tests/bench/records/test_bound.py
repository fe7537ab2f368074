import pytest

from gradwire.bench.records.bound import step_bound


def test_the_wire_bounds_a_step_that_sends_much() -> None:
    # 10 MB at 100 Mbit/s take 0.8 s, a tenth of them 80 ms.
    bound = step_bound("100mbit", wire_bytes=1e7, exposed_bytes=1e6, compute_ms=50.0)
    assert bound.wire_ms == pytest.approx(800.0)
    assert bound.step_ms == pytest.approx(800.0)


def test_computation_and_the_last_bucket_bound_a_step_that_sends_little() -> None:
    bound = step_bound("1gbit", wire_bytes=1e6, exposed_bytes=5e5, compute_ms=50.0)
    assert bound.wire_ms == pytest.approx(8.0)
    assert bound.step_ms == pytest.approx(54.0)


def test_without_the_computation_only_the_wire_is_known() -> None:
    assert step_bound("1gbit", 1e6, 5e5, None) == (pytest.approx(8.0), None)
