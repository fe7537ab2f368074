import pytest

from gradwire.errors import ConfigError
from gradwire.testbed.shaping import Shape


@pytest.mark.parametrize("rate", ["1mbit", "100mbit", "1gbit", "10gbit", "34gbit"])
def test_a_bucket_holds_two_packets_and_the_queue_a_bucket(rate: str) -> None:
    shape = Shape.parse(rate)
    assert shape is not None
    assert 2 * shape.gso_bytes <= shape.burst_bytes <= shape.queue_bytes


def test_the_bucket_holds_a_millisecond() -> None:
    assert Shape(100_000_000).burst_bytes == 12_500


def test_no_rate_means_no_shape() -> None:
    assert Shape.parse(None) is None


@pytest.mark.parametrize("rate", ["1bit", "40gbit"])
def test_rates_out_of_tbf_range_are_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match=f"to be shaped, got {rate}"):
        Shape.parse(rate)
