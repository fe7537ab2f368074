"""Costs of collectives by hand, and link models recovered from measured durations."""

import pytest

from gradwire.comm.cost_model import (
    KINDS,
    Kind,
    LinkModel,
    Network,
    fit,
    format_rate,
    parse_latency,
    parse_rate,
)
from gradwire.errors import ConfigError

# Half a second per hop, a megabyte per second.
LINK = LinkModel(latency_s=0.5, rate_bits=8e6)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("mean", 6 * (0.5 + 0.25)),
        ("gather", 3 * (0.5 + 1)),
        ("all_to_all", 0.5 + 1),
        ("broadcast", 2 * (0.5 + 1)),
    ],
)
def test_a_megabyte_among_four_by_hand(kind: Kind, seconds: float) -> None:
    assert LINK.call_s(kind, 10**6, 4) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_of_one_rank_takes_no_time(kind: Kind) -> None:
    assert LINK.call_s(kind, 10**6, 1) == 0


def test_a_tree_grows_by_levels() -> None:
    hop_s = 0.5 + 1
    levels = {
        n: round(LINK.call_s("broadcast", 10**6, n) / hop_s) for n in (2, 3, 4, 5, 8, 9, 1024)
    }
    assert levels == {2: 1, 3: 2, 4: 2, 5: 3, 8: 3, 9: 4, 1024: 10}


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_fit_recovers_a_link_from_two_collectives(kind: Kind, size: int) -> None:
    small, large = ((n, LINK.call_s(kind, n, size)) for n in (4096, 10**6))
    found = fit(kind, size, small, large)
    assert found.latency_s == pytest.approx(LINK.latency_s)
    assert found.rate_bits == pytest.approx(LINK.rate_bits)


def test_noise_gives_no_negative_rate() -> None:
    found = fit("mean", 2, (100, 2.0), (1000, 1.0))
    assert found.rate_bits > 0
    assert found.latency_s == pytest.approx(1.0)


def test_work_is_counted_by_hops_and_bytes() -> None:
    link = LinkModel(1.0, 1e9, hop_work_s=2.0, byte_work_s=0.001)
    assert link.work_s("gather", 1000, 3) == pytest.approx(2 * 2.0 + 2 * 1000 * 0.001)


def test_collectives_inside_nodes_use_their_own_link() -> None:
    fast, measured = LinkModel(rate_bits=1e11), LinkModel(rate_bits=5e8)
    network = Network(LINK, inside=fast, measured={"gather": measured})
    assert network.link_for("gather", inside=True) is fast
    assert network.link_for("gather", inside=False) is measured
    assert network.link_for("mean", inside=False) is LINK


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latency_s": -1.0}, "latency: must not be negative, got -1 s"),
        ({"rate_bits": 0.0}, "rate: must be at least 1bit, got 0"),
    ],
)
def test_impossible_links_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LinkModel(**settings)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.1ms", 1e-4), ("50us", 5e-5), ("2 s", 2.0), ("0ms", 0.0)]
)
def test_latencies_are_parsed(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "-1ms", "1min"])
def test_a_latency_needs_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match="latency: expected a number and s, ms or us"):
        parse_latency(text)


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
def test_rates_are_parsed(text: str, rate_bits: int) -> None:
    assert parse_rate(text) == rate_bits


@pytest.mark.parametrize(
    "text", ["fast", "", "100", "mbit", "-1mbit", "1e3bit", "100mbps", "1,5gbit"]
)
def test_other_rates_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text)
    assert str(caught.value) == (
        f"rate: expected a number and bit, kbit, mbit or gbit such as '100mbit', got {text!r}"
    )


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate: must be at least 1bit, got '0mbit'"):
        parse_rate("0mbit")


@pytest.mark.parametrize("text", ["999bit", "1kbit", "100mbit", "1gbit", "1.5gbit", "33.333mbit"])
def test_formatting_inverts_parsing(text: str) -> None:
    assert format_rate(parse_rate(text)) == text


def test_a_rate_of_zero_is_formatted() -> None:
    assert format_rate(0) == "0bit"
