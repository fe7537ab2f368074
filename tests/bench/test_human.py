"""Numbers as people read them."""

import pytest

from gradwire.bench import human


@pytest.mark.parametrize(
    ("mean", "deviation", "form", "text"),
    [
        (377.0, 0.354, human.duration_ms, "377 ± 0 ms"),
        (23.7, 0.31, human.duration_s, "23.7 ± 0.3 s"),
        (0.922, 0.0007, human.digits, "0.922 ± 0.001"),
        (-1.5, 0.2, human.digits, "-1.50 ± 0.20"),
        (1234.5e3, 20e3, human.byte_size, "1.23 ± 0.02 MB"),
        # Two units share no decimals.
        (371.0, 15.3, human.duration_s, "6 min 11 s ± 15.3 s"),
        (0.0, 0.5, human.digits, "0 ± 0.500"),
    ],
)
def test_a_deviation_has_the_decimals_and_unit_of_its_mean(
    mean: float, deviation: float, form: object, text: str
) -> None:
    assert human.spread(mean, deviation, form) == text  # type: ignore[arg-type]
