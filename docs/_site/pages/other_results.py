"""Tables of records other than benchmark runs: forecasts, studies, hostile bytes."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, TypeAlias

from gradwire.bench import human
from gradwire.bench.records.compare import group
from gradwire.bench.records.schema import ForecastRecord
from pages.markdown import code, listed, table

Row: TypeAlias = dict[str, Any]

CLOSE = 0.15
"""A prediction with a smaller relative error counts as correct."""

LONGEST = 60
"""Rows that are shown of a table without a summary."""


def forecasts(records: Sequence[ForecastRecord]) -> Iterator[str]:
    """Yields predicted step times beside measured ones, where there are any."""
    lines = [
        [
            code(r.spec),
            human.rate(r.rate or "unshaped"),
            str(r.workers),
            human.duration_ms(r.step_ms),
            human.duration_ms(r.measured_ms),
            human.NO_VALUE if r.prediction_error is None else f"{r.prediction_error:+.0%}",
            human.byte_size(r.sent_bytes),
        ]
        for r in records
    ]
    offs = [abs(r.prediction_error) for r in records if r.prediction_error is not None]
    if offs:
        close = sum(prediction_error <= CLOSE for prediction_error in offs)
        yield (
            f"{close} of {len(offs)} predictions are within {CLOSE:.0%} of what was measured; "
            f"half of them within {median(offs):.0%}."
        )
    columns = ("method", "rate", "workers", "predicted", "measured", "off by", "sent per step")
    yield table(columns, lines, words=2)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yields tables of the rows, in the form of their kind."""
    for kind, found in group(rows, lambda row: row.get("kind")).items():
        if kind == "fuzz":
            yield from _fuzz(found)
        elif kind == "follow":
            yield from _changing_links(found)
        elif kind == "kill":
            yield f"{len(found)} workers were killed, one after the other."
        elif kind is None and {"case", "step", "sent_bytes", "dense_bytes"} <= found[0].keys():
            yield from _study(found)
        else:
            yield from plain(found)


def _changing_links(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the phases of every run on links that change, for each workload and machine."""
    for runs in group(rows, lambda r: (r["workload"], r["workers"], str(r["machine"]))).values():
        one = runs[0]
        yield f"### {one['workload']}, {one['workers']} workers"
        lines = [
            [
                code(run["spec"]),
                human.rate(phase["rate"]),
                str(phase["steps"]),
                human.duration_s(phase["seconds"]),
                human.duration_ms(phase["settled_ms"]),
                _after(phase),
                code(phase["setting"]) if phase["setting"] else human.NO_VALUE,
            ]
            for run in runs
            for phase in run["phases"]
        ]
        columns = (
            "method", "rate", "steps", "time", "settled step", "changed after", "settled on"
        )  # fmt: skip
        yield table(columns, lines, words=2)
        yield code(one["command"])


def _after(phase: Row) -> str:
    """Returns the steps of a phase until the setting changed; older records have none."""
    steps = phase.get("changed_after")
    return human.NO_VALUE if steps is None else f"{steps} steps"


def _fuzz(rows: Sequence[Row]) -> Iterator[str]:
    """Yields counts of hostile messages, summed by the kind of method."""
    names = group(rows, lambda row: str(row["spec"]).split(":")[0].split(" ")[0])
    counts = ("messages", "decoded", "refused", "crashes")
    lines = [
        [code(name), *(f"{sum(row[count] for row in own):,}" for count in counts)]
        for name, own in names.items()
    ]
    total = [f"{sum(row[count] for row in rows):,}" for count in counts]
    yield (
        f"{total[0]} hostile or broken messages to {len(rows)} settings of {len(names)} methods: "
        f"{total[1]} could be read, {total[2]} were refused with `WireError`, and {total[3]} "
        "did anything else."
    )
    yield table(("method", *counts), lines)


def _study(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the end of each run of a study of local methods; bytes are one worker's in all."""
    by_setting = group(rows, lambda row: (row.get("workload"), row.get("workers")))
    for (workload, workers), found in by_setting.items():
        ends = group(found, lambda row: (row["case"], row.get("seed"))).values()
        lines = [_end(runs[-1]) for runs in ends]
        yield f"### {workload}, {workers} workers"
        columns = ("case", "seed", "steps", "loss", "metric", "sent", "less than dense")
        yield table(columns, lines)


def _end(row: Row) -> list[str]:
    less = human.times(row["dense_bytes"] / row["sent_bytes"] if row["sent_bytes"] else None)
    numbers = [human.digits(row.get(name)) for name in ("evaluation_loss", "metric")]
    sent = human.byte_size(row["sent_bytes"])
    return [code(row["case"]), str(row.get("seed", "")), f"{row['step']:,}", *numbers, sent, less]


def plain(rows: Sequence[Row]) -> Iterator[str]:
    """Yields rows of an unknown form: a line of the values that are equal in all, then a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    simple = [n for n in names if all(isinstance(row.get(n), _SIMPLE) for row in rows)]
    alike = [n for n in simple if len({row.get(n) for row in rows}) == 1 and n not in _DULL]
    differ = [n for n in simple if n not in alike and n not in _DULL]
    if alike:
        yield listed(f"{_words(n)} {_shown(rows[0].get(n))}" for n in alike) + "."
    if differ:
        lines = [[_shown(row.get(n)) for n in differ] for row in rows[:LONGEST]]
        yield table([_words(n) for n in differ], lines)
    if len(rows) > LONGEST and differ:
        yield f"And {len(rows) - LONGEST} more rows."


_SIMPLE = (str, int, float, bool, type(None))
_DULL = ("command", "version", "kind")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: human.NO_VALUE}[value]
    return human.digits(value) if isinstance(value, float) else str(value)
