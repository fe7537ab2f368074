"""Writes the report: one HTML page with its data, script and style inside, which loads nothing."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

from gradwire.bench.records.compare import group, kernel_setting, step_setting, train_setting
from gradwire.bench.records.schema import AnyRecord, KernelRecord, StepRecord, TrainRecord
from gradwire.bench.report import markup, overview
from gradwire.bench.report.grid import kernel_grid, step_grid, train_grid
from gradwire.bench.report.plots import plots
from gradwire.bench.report.scaling import scalings
from gradwire.bench.report.section import Section, methods_of
from gradwire.bench.report.summary import (
    gain_over_dense,
    kernel_summary,
    step_summary,
    train_summary,
)
from gradwire.bench.report.topics.robustness import (
    elastic_sections,
    fault_sections,
    fuzz_sections,
    guard_sections,
    overhead_sections,
)
from gradwire.bench.report.topics.timing import (
    follow_sections,
    forecast_sections,
    keras_sections,
    levels_sections,
)
from gradwire.errors import ConfigError

SCRIPTS = ("format.js", "scale.js", "draw.js", "curves.js", "bars.js", "dots.js", "main.js")
TOPICS = (
    follow_sections,
    forecast_sections,
    levels_sections,
    keras_sections,
    guard_sections,
    overhead_sections,
    fuzz_sections,
    fault_sections,
    elastic_sections,
)
"""The sections after the runs and the kernels, in this order."""


def write_report(records: Sequence[AnyRecord], path: Path) -> None:
    """Writes the page to `path`, replacing an existing file."""
    page = render(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report to {path}: {error.strerror}") from error


def render(records: Sequence[AnyRecord]) -> str:
    if not records:
        raise ConfigError("nothing to report: the files hold no records")
    sections = sections_of(records)
    values = {
        "title": escape(f"Gradwire report: {sections[0].heading}"),
        "heading": markup.prose(sections[0].heading if len(sections) == 1 else "Benchmark report"),
        "lead": overview.lead(sections),
        "legend": overview.legend(sections),
        "style": _asset("style.css"),
        "script": "{\n" + "".join(map(_asset, SCRIPTS)) + "}",
        "sections": overview.body(sections, _parts(sections)),
        "runs": markup.provenance(records),
        "data": markup.data(
            methods_of(sections), [plot for part in sections for plot in part.plots]
        ),
    }
    # One pass, so that "{{data}}" inside a record stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))


def sections_of(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns the sections: one per setting of runs and kernels, then scaling and other topics.

    No two have the same heading.
    """
    seen: Counter[str] = Counter()
    sections = []
    for section in _all_sections(records):
        seen[section.heading] += 1
        number = seen[section.heading]
        name = section.heading if number == 1 else f"{section.heading} ({number})"
        kind = section.group or re.split("[:,]", section.heading)[0]
        sections.append(replace(section, heading=name, group=kind))
    return sections


def _all_sections(records: Sequence[AnyRecord]) -> list[Section]:
    train = group((r for r in records if isinstance(r, TrainRecord)), train_setting)
    step = group((r for r in records if isinstance(r, StepRecord)), step_setting)
    kernel = group((r for r in records if isinstance(r, KernelRecord)), kernel_setting)
    return (
        [
            Section(
                setting.words(),
                train_summary(runs),
                train_grid(runs),
                tuple(plots(runs)),
                tuple(runs),
                group=f"Training: {runs[0].workload}",
                gain=gain_over_dense(runs),
            )
            for setting, runs in train.items()
        ]
        + [
            Section(
                setting.words(),
                step_summary(runs),
                step_grid(runs),
                tuple(plots(runs)),
                group=f"Step times: {setting.workload or 'the MLP'}",
                gain=gain_over_dense(runs),
            )
            for setting, runs in step.items()
        ]
        + [
            Section(
                setting.words(),
                kernel_summary(rows),
                kernel_grid(rows),
                tuple(plots(rows)),
                group=f"Kernels on {setting.device}",
            )
            for setting, rows in kernel.items()
        ]
        + [
            Section(*scaling, group="Scaling with workers")
            for scaling in scalings([r for rs in train.values() for r in rs])
        ]
        + [section for topic in TOPICS for section in topic(records)]
    )


def _parts(sections: Sequence[Section]) -> list[str]:
    """Renders every section; charts are numbered as in the page's data."""
    parts, first = [], 0
    for index, section in enumerate(sections):
        heading = markup.heading(section.heading) if len(sections) > 1 else ""
        figures = markup.figures(section.plots, first) if section.plots else ""
        table, decisions = markup.table(section.grid), markup.timelines(section.runs)
        parts.append(f'<section id="s{index}">{heading}{table}{figures}{decisions}</section>')
        first += len(section.plots)
    return parts


def _asset(name: str) -> str:
    return (files("gradwire.bench.report") / "page" / name).read_text(encoding="utf-8")
