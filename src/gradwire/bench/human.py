"""Formats numbers for people: three digits and a unit, and a dash for a missing value."""

import math
import re
from collections.abc import Callable

NO_VALUE = "–"  # noqa: RUF001  an en dash is what tables use for an empty cell

_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<prefix>[kmgt]?)bit")


def digits(value: float | None) -> str:
    """Formats three significant digits, without an exponent at the sizes that occur here."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{min(6, max(0, 2 - magnitude))}f}"


def goal(value: float) -> str:
    """Formats a number that a user chose, such as a target, as short as possible."""
    return f"{value:.4g}"


def byte_size(value: float | None) -> str:
    """Formats bytes in decimal units, as networks do: 35 MB is 35 million bytes."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    for size, unit in _BYTE_UNITS:
        # 999.6 kB would round to "1,000 kB".
        if value >= 0.9995 * size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def duration_s(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if value < 0.9995:
        return f"{digits(value * 1e3)} ms"
    if value < 119.5:
        return f"{digits(value)} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def duration_ms(value: float | None) -> str:
    return NO_VALUE if value is None else duration_s(value / 1e3)


def times(value: float | None) -> str:
    """Formats a factor: 2.9×."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{digits(value)}×"  # noqa: RUF001


def spread(mean: float, deviation: float, form: Callable[[float], str]) -> str:
    """Formats a mean and its standard deviation, which gets the mean's unit and decimals."""
    text = form(mean)
    found = re.fullmatch(r"(?P<number>-?[\d,]+(\.(?P<decimals>\d+))?)(?P<unit>\D*)", text)
    if found is None or mean == 0:
        return f"{text} ± {form(deviation)}"
    scale = abs(float(found["number"].replace(",", "")) / mean)
    decimals = len(found["decimals"] or "")
    return f"{found['number']} ± {deviation * scale:.{decimals}f}{found['unit']}"


def rate(value: str) -> str:
    """Formats 100mbit as 100 Mbit/s; returns text of another form unchanged."""
    match = _RATE.fullmatch(value.strip().lower())
    if match is None:
        return value
    prefix = match["prefix"]
    return f"{match['number']} {prefix if prefix == 'k' else prefix.upper()}bit/s"
