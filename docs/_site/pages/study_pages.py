"""Writes docs/results/: a page and a plot for every study that has a claim, and their index."""

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from gradwire.bench import human
from gradwire.bench.records.compare import group
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.run_lengths import best_length_grid
from gradwire.bench.report.study_facts import PERCENT, metric_text
from gradwire.bench.report.study_grids import study_grid
from gradwire.bench.studies.claim import Claim
from gradwire.bench.studies.claims import CLAIMS as FIXED_CLAIMS
from gradwire.bench.studies.definitions import STUDIES
from gradwire.bench.studies.paper_tables import GRACE_TASKS
from gradwire.bench.studies.study import Study
from gradwire.bench.studies.table_claims import TABLE_CLAIMS
from gradwire.spec import read_settings
from pages import demo_page, grace_page, measured_pages
from pages.markdown import GENERATED, code, fence, fold, listed, table
from pages.results import FACTS, grid_table, raw_tables
from pages.study_plot import Curve, Drawn, Method, MethodsPlot, draw

SIMULATED = (
    "Workers are simulated in lock step: losses and bytes are those of a cluster, times are "
    "computed from one measured compute time per workload and device, the bytes, and the links "
    "([what is simulated](studies.md#what-is-simulated-and-what-is-not))."
)
DENSE = "dense"
CLAIMS: Mapping[str, Claim] = {**FIXED_CLAIMS, **TABLE_CLAIMS}


@cache
def all_runs(results: Path) -> tuple[TrainRecord, ...]:
    """Returns the training runs of all studies."""
    files = sorted((results / "studies").glob("*.jsonl"))
    return tuple(r for r in read(files) if isinstance(r, TrainRecord))


def decided(results: Path) -> dict[str, Claim]:
    """Returns the claims of studies that have a file of records."""
    files = {path.stem for path in (results / "studies").glob("*.jsonl")}
    return {name: claim for name, claim in CLAIMS.items() if name in files}


def texts(results: Path) -> dict[str, str]:
    """Returns the text of every page, by its file name in docs/results/."""
    pages = {f"{name}.md": _page(name, results) for name in decided(results)}
    pages["grace.md"] = grace_page.page(results, all_runs(results))
    pages |= measured_pages.texts(results)
    pages |= demo_page.texts(results)
    return pages | {"index.md": _index(results)}


def plots(results: Path) -> dict[str, Drawn]:
    """Returns what each plot shows, by its file name in docs/results/."""
    found: dict[str, Drawn] = {}
    for name, claim in decided(results).items():
        runs = study_runs(name, claim, results)
        found[f"{name}.svg"] = methods_plot(runs)
        if curves := factor_curves(runs, claim.rate):
            found[f"{name}-factors.svg"] = curves
    return found | grace_page.plots(all_runs(results)) | demo_page.plots(results)


def write(folder: Path, results: Path) -> None:
    """Writes all pages and plots; removes those of earlier runs that are no longer made."""
    folder.mkdir(exist_ok=True)
    written = texts(results)
    for name, drawn in plots(results).items():
        written[name] = draw(drawn, f"{Path(name).stem}: results")
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in made(folder):
        if path.name not in written:
            path.unlink()


def made(folder: Path) -> list[Path]:
    """Returns the pages and plots of a folder that are made from records; others are by hand."""
    pages = [p for p in folder.glob("*.md") if p.read_text("utf-8").startswith(GENERATED)]
    return pages + list(folder.glob("*.svg"))


def study_runs(name: str, claim: Claim, results: Path) -> list[TrainRecord]:
    return claim.records(STUDIES[name], all_runs(results))


def verdict(name: str, results: Path) -> str:
    claim = CLAIMS[name]
    return claim.text(name, claim.facts(study_runs(name, claim, results)))


def _page(name: str, results: Path) -> str:
    claim, study = CLAIMS[name], STUDIES[name]
    runs = study_runs(name, claim, results)
    timed = [run for run in runs if run.rate == claim.rate]
    factors = f"![Compression factor over steps]({name}-factors.svg)"
    grid = study_grid(timed)
    parts = [
        GENERATED,
        f"# {claim.title}",
        f"**Claim.** {claim.claim}",
        verdict(name, results),
        f"![Quality, bytes and speed of every method]({name}.svg)",
        *([factors] if factor_curves(runs, claim.rate) else []),
        f"{_setting(runs[0])}. Means ± standard deviations over seeds; times at "
        f"{human.rate(claim.rate)}. An interrupted run has a row of its own.",
        grid_table(grid),
        *_gravac_table(claim, runs),
        *_by_learning_rate(name, claim, results),
        *_by_length(name, claim, results),
        *_times_to_quality(claim, runs),
        "## Repeat it",
        _repeat(name, study, claim, runs),
        "## Caveats",
        "\n".join(f"- {text}" for text in (*_seed_caveat(runs), *claim.caveats, SIMULATED)),
        "## Raw tables",
        *_raw(name, results),
    ]
    return "\n\n".join(parts) + "\n"


def _seed_caveat(runs: Sequence[TrainRecord]) -> list[str]:
    """Returns a warning if a method has one seed."""
    seeds = [len({run.seed for run in own}) for own in group(runs, lambda r: r.spec).values()]
    few, total = seeds.count(1), len(seeds)
    if not few:
        return []
    which = "All methods have" if few == total else f"{few} of {total} methods have"
    return [f"{which} one seed: small differences mean nothing."]


def _setting(run: TrainRecord) -> str:
    return f"{run.workload}, {run.workers} workers, {run.steps:,} steps"


def _gravac_table(claim: Claim, runs: Sequence[TrainRecord]) -> list[str]:
    """Returns GraVAC's own columns: floats and bytes sent, speed over top-k 10x, quality."""
    facts = claim.facts(runs)
    specs = list(dict.fromkeys(run.spec for run in facts.records if run.rate == claim.rate))
    if "topk:ratio=0.1" not in specs or not any("gravac" in spec for spec in specs):
        return []
    factors = {curve.label: mean_factor(curve) for curve in factor_curves(runs, claim.rate)}
    lines = []
    for spec in specs:
        name, settings = read_settings(spec.partition("@")[0].strip())
        static = 1 / float(settings["ratio"]) if "ratio" in settings else 1.0
        known = factors.get(spec, None if "controller=" in spec else static)
        change = facts.metric(spec) - facts.metric() if BASELINE in specs else None
        share = facts.runs(spec)[0].metric_name in PERCENT
        lines.append(
            [
                code(spec),
                human.times(known if name not in (BASELINE, "torch-bf16") else 1.0),
                human.times(facts.ratio(spec)),
                human.times(facts.speed(spec, "topk:ratio=0.1")),
                human.NO_VALUE
                if change is None
                else (f"{100 * change:+.1f} points" if share else f"{change:+.1f}"),
            ]
        )
    columns = ("method", "fewer floats", "fewer bytes", "speed over top-k 10x", "against dense")
    return ["Floats are values of one worker's message, without positions:", table(columns, lines)]


def mean_factor(curve: Curve) -> float:
    """Returns the factor by which fewer floats are sent in all steps together."""
    ends = [*curve.steps[1:], curve.last_step]
    spans = [max(0, end - start) for start, end in zip(curve.steps, ends, strict=True)]
    sent = sum(span / factor for span, factor in zip(spans, curve.factors, strict=True))
    return sum(spans) / sent if sent else 1.0


def _by_learning_rate(name: str, claim: Claim, results: Path) -> list[str]:
    """Returns the quality of every method at every learning rate of a study's grid."""
    study = STUDIES[name]
    if not study.learning_rates:
        return []
    runs = [
        r
        for r in claim.all_rates(study, all_runs(results))
        if r.rate == claim.rate and r.status == "done" and r.metric is not None
    ]
    forms = [form.workload for form in study.by_learning_rate()]
    by_cell = group(runs, lambda run: (run.spec, run.workload_spec))
    lines = []
    for spec in dict.fromkeys(run.spec for run in runs):
        cells = [by_cell.get((spec, form), []) for form in forms]
        lines.append([code(spec), *(_end_of(own) for own in cells)])
    columns = ("method", *(f"rate {rate:g}" for rate in study.learning_rates))
    return [
        "The table above has each method at its best learning rate. At all of them:",
        table(columns, lines),
    ]


def _by_length(name: str, claim: Claim, results: Path) -> list[str]:
    """Returns the times to the target at each method's best length of run, if there are several."""
    study = STUDIES[name]
    steps = {form.steps for form in study.by_length()}
    grid = best_length_grid(
        [
            r
            for r in all_runs(results)
            if (r.workload_spec, r.workers, r.rate) == (study.workload, study.workers, claim.rate)
            and r.steps in steps
            and r.spec in study.cases
        ]
    )
    return [] if grid is None else ["At the best length of run of each method:", grid_table(grid)]


def _end_of(runs: Sequence[TrainRecord]) -> str:
    known = [run.metric for run in runs if run.metric is not None]
    return metric_text(runs[0].metric_name, known) if known else human.NO_VALUE


BELOW_DENSE = (0.03, 0.01, 0.005, 0.0)
"""Goals of a share: dense training's end less so much."""
OVER_DENSE = (1.15, 1.05, 1.01, 1.0)
"""Goals of a metric that falls: so many times dense training's end."""


def _times_to_quality(claim: Claim, runs: Sequence[TrainRecord]) -> list[str]:
    """Returns the time at which each method first has a quality near dense training's end."""
    facts = claim.facts(runs)
    specs = list(dict.fromkeys(run.spec for run in facts.records if run.rate == claim.rate))
    if BASELINE not in specs:
        return []
    end, falls = facts.metric(), facts.runs(BASELINE)[0].metric_better == "lower"
    goals = [end * f for f in OVER_DENSE] if falls else [end - less for less in BELOW_DENSE]
    name = facts.runs(BASELINE)[0].metric_name
    columns = [f"to {metric_text(name, [goal])}" for goal in goals]
    lines = [[code(spec), *(facts.time(spec, goal) for goal in goals)] for spec in specs]
    summary = f"Time to a quality near that of dense training, at {human.rate(claim.rate)}"
    return [fold(summary, table(("method", *columns), lines))]


def _raw(name: str, results: Path) -> list[str]:
    path = results / "studies" / f"{name}.jsonl"
    text = raw_tables(path, results)
    return [fold(f"Every run of results/studies/{name}.jsonl", text)]


def _repeat(name: str, study: Study, claim: Claim, runs: Sequence[TrainRecord]) -> str:
    device = runs[0].device
    words = ["gradwire", "study", name]
    if claim.workload is not None:
        words += ["--workload", claim.workload, "--steps", str(claim.steps)]
    words += ["--device", device, "--data", "DIR", "--jobs", "8"]
    words += ["--json", f"results/studies/{name}.jsonl"]
    machines = group(runs, lambda run: tuple(run.machine.get(key) for key in FACTS[:4]))
    facts = [_machine(own[0].machine) for own in machines.values()]
    return (
        f"{fence(shlex.join(words), 'console')}\n\n{_took(runs)} Machine: {'; '.join(facts)}. "
        f"`gradwire study {name} --smoke` takes a few steps of every case on a CPU."
    )


def _machine(machine: Mapping[str, str]) -> str:
    return listed(f"{key} {machine[key]}" for key in FACTS if key in machine and key != "commit")


def _took(runs: Sequence[TrainRecord]) -> str:
    """Says how long the runs take one after the other, where records have that."""
    once = {(run.spec, run.seed): run for run in runs}.values()
    known = [(r.lockstep_ms, r.steps) for r in once if r.lockstep_ms and r.steps]
    if not known:
        return "The records do not say how long it took."
    total_s = sum(ms * steps / 1e3 for ms, steps in known)
    return (
        f"The steps of {len(known)} of {len(once)} runs took {human.duration_s(total_s)} in all "
        "(with others at the same time)."
    )


def methods_plot(runs: Sequence[TrainRecord]) -> MethodsPlot:
    """Returns a row per method with finished runs, dense first."""
    done = [run for run in runs if run.status == "done" and run.metric is not None]
    by_spec = group(done, lambda run: run.spec)
    speeds = {spec: _steps_s(own) for spec, own in by_spec.items()}
    dense = speeds.get(BASELINE, {})
    order = sorted(by_spec, key=lambda spec: (spec != BASELINE, spec))
    name = next((run.metric_name for run in done if run.metric_name), "metric")
    factor = 100 if name in PERCENT else 1
    methods = []
    for spec in order:
        values = [factor * (run.metric or 0) for run in _once(by_spec[spec])]
        ratios = [run.ratio for run in by_spec[spec] if run.ratio is not None]
        methods.append(
            Method(
                spec,
                fmean(values),
                stdev(values) if len(values) > 1 else 0.0,
                fmean(ratios) if ratios else None,
                {human.rate(r): dense[r] / s for r, s in speeds[spec].items() if r in dense},
            )
        )
    unit = f"{name}, %" if factor == 100 else name
    return MethodsPlot(unit, BASELINE, tuple(methods))


def _once(runs: Sequence[TrainRecord]) -> list[TrainRecord]:
    """Returns one run per seed."""
    return [*{run.seed: run for run in runs}.values()]


def _steps_s(runs: Sequence[TrainRecord]) -> dict[str, float]:
    """Returns the mean time of a step at each rate, fastest links first."""
    found = {
        rate: fmean(run.points[-1].time_s / run.points[-1].step for run in own)
        for rate, own in group(runs, lambda run: run.rate or "").items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def factor_curves(runs: Sequence[TrainRecord], rate: str) -> tuple[Curve, ...]:
    """Returns the factors of GraVAC's runs over time, as their decisions say."""
    curves = []
    for run in runs:
        if run.rate != rate or run.seed or "gravac" not in run.spec or not run.timeline:
            continue
        factors = tuple(_factor(change.setting) for change in run.timeline)
        steps = tuple(change.step for change in run.timeline)
        curves.append(Curve(run.spec, steps, factors, run.points[-1].step))
    return tuple(curves)


def _factor(setting: str) -> float:
    return 1.0 if setting == DENSE else float(setting.removesuffix("x"))


def _index(results: Path) -> str:
    rows = [
        (f"[{claim.title}]({name}.md)", claim.claim, verdict(name, results))
        for name, claim in decided(results).items()
    ]
    rows.append(grace_page.index_row(all_runs(results)))
    others = [f"- [{title}]({name})" for name, title in measured_pages.titles().items()]
    if demo_page.records_of(results):
        others.insert(0, f"- [{demo_page.TITLE}]({demo_page.PAGE})")
    waiting = sorted(set(STUDIES) - set(decided(results)) - set(GRACE_TASKS))
    parts = [
        GENERATED,
        "# Results",
        "One line a study: what is claimed, and what the records in `results/` say. Figures are "
        "computed from the records; a test compares every page with them. "
        "[How studies are run](studies.md).",
        table(("study", "claim", "verdict"), rows, words=3),
        "## Measurements",
        "\n".join(others),
        "## Not run yet",
        "These studies are defined, and have no committed records: "
        f"{listed(code(name) for name in waiting)}.",
    ]
    return "\n\n".join(parts) + "\n"
