import pytest

from laconic.errors import ConfigError
from laconic.network.rate import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "rate_bits"),
    [
        ("800bit", 800),
        ("56kbit", 56_000),
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("1.5gbit", 1_500_000_000),
        (" 10 Gbit ", 10_000_000_000),
    ],
)
def test_reads_what_people_write(text: str, rate_bits: int) -> None:
    assert parse_rate(text) == rate_bits


@pytest.mark.parametrize(
    "text", ["fast", "", "100", "mbit", "-1mbit", "1e3bit", "100mbps", "1,5gbit"]
)
def test_refuses_the_rest_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text)
    assert str(caught.value) == (
        f"rate: expected a number and bit, kbit, mbit or gbit such as '100mbit', got {text!r}"
    )


def test_refuses_a_rate_of_nothing() -> None:
    with pytest.raises(ConfigError, match="rate: must be at least 1bit, got '0mbit'"):
        parse_rate("0mbit")


@pytest.mark.parametrize("text", ["999bit", "1kbit", "100mbit", "1gbit", "1.5gbit", "33.333mbit"])
def test_prints_what_it_reads(text: str) -> None:
    assert format_rate(parse_rate(text)) == text


def test_prints_an_idle_link() -> None:
    assert format_rate(0) == "0bit"
