"""The page of the GRACE matrix: plots and a table per task, properties, latency, headlines."""

from collections.abc import Sequence
from pathlib import Path

import torch

from gradwire.base import Compressor
from gradwire.bench import human
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import BASELINE, KernelRecord, TrainRecord
from gradwire.bench.report.study_facts import Facts, MissingRunError
from gradwire.bench.report.study_grids import study_grid
from gradwire.bench.studies.definitions import STUDIES
from gradwire.bench.studies.grace import GRACE_METHODS, WITHOUT_FEEDBACK
from gradwire.bench.studies.paper_tables import GRACE_TASKS as TASKS
from gradwire.catalogue import rows
from gradwire.spec import parse, read_settings
from gradwire.types import EncodeContext
from pages import measure
from pages.grace_headlines import HEADLINES, Headline
from pages.markdown import GENERATED, code, fence, fold, table
from pages.results import grid_table
from pages.study_plot import MethodsPlot

NOT_RUN = "not run"
RATES = ("25gbit", "10gbit", "1gbit")
WITH_FEEDBACK = (
    "8-bit",
    "1-bit SGD",
    "Natural",
    "EF-SignSGD",
    "Random-k",
    "Top-k",
    "Threshold-v",
    "DGC",
    "Adaptive",
    "SketchML",
    "PowerSGD",
)
"""The methods that GRACE's authors ran with error feedback; DGC and PowerSGD with their own."""
TITLE = "GRACE: sixteen methods on six tasks"
CLAIM = (
    "No method is best everywhere: the network, the model and the cost of compression decide, and "
    "many methods are slower than no compression (Xu et al. 2021)."
)
CAVEATS = (
    "Baselines are DDP in 32 bits and in bfloat16; GRACE compared with Horovod over MPI, where no "
    "compression is slower.",
    "Messages are packed: signs take one bit an entry, where GRACE's take eight.",
    "DGC in the table has the warm-up of its ratio; with momentum correction and masking it has a "
    "row of its own on the image tasks, and with clipping on the LSTM. NeuMF and U-Net use Adam.",
    "Runs are shorter than GRACE's, and models smaller on CIFAR-10.",
)


def page(results: Path, runs: Sequence[TrainRecord]) -> str:
    parts = [
        GENERATED,
        f"# {TITLE}",
        f"**Claim.** {CLAIM}",
        _verdict(runs),
        "## Headlines",
        table(("published", "here", "figure"), [_headline(h, runs) for h in HEADLINES], words=3),
        "## Tasks",
        *(part for task in TASKS for part in _task(task, runs)),
        "## Properties of the methods",
        "*Draws at random* is measured: whether two messages of one tensor differ. The other "
        "columns are those of the classes; *GRACE* says whether its authors used error feedback.",
        table(
            ("method", "here", "family", "draws at random", "property", "memory", "GRACE"),
            [_properties(name, spec) for name, spec in GRACE_METHODS.items()],
            words=7,
        ),
        "## Latency of encoding and decoding",
        "One message, by the number of elements, with the settings of the kernel records "
        "([kernels](kernels.md)); sizes without a record are not run.",
        *_latency(results),
        "## Repeat it",
        fence(
            "\n".join(
                f"gradwire study {task} --device cuda --data DIR --jobs 8 "
                f"--json results/studies/{task}.jsonl"
                for task in TASKS
            ),
            "console",
        ),
        "## Caveats",
        "\n".join(f"- {text}" for text in CAVEATS),
    ]
    return "\n\n".join(parts) + "\n"


def plots(runs: Sequence[TrainRecord]) -> dict[str, MethodsPlot]:
    """Returns the plots of the tasks that have records, by file name."""
    # The plot of a study is defined there, and that module makes this page.
    from pages.study_pages import methods_plot

    found = {task: _runs(task, runs) for task in TASKS}
    return {f"{task}.svg": methods_plot(own) for task, own in found.items() if _is_run(own)}


def index_row(runs: Sequence[TrainRecord]) -> tuple[str, str, str]:
    return f"[{TITLE}](grace.md)", CLAIM, _verdict(runs)


def _verdict(runs: Sequence[TrainRecord]) -> str:
    decided = [_headline(headline, runs)[1] for headline in HEADLINES]
    counts = {word: decided.count(word) for word in dict.fromkeys(decided)}
    return "**Headlines of the paper:** " + ", ".join(f"{n} {w}" for w, n in counts.items()) + "."


def _headline(headline: Headline, runs: Sequence[TrainRecord]) -> tuple[str, str, str]:
    if headline.study is None or headline.decide is None:
        return headline.published, "not comparable", headline.why_not
    own = [run for run in _runs(headline.study, runs) if run.status == "done"]
    try:
        holds, figure = headline.decide(Facts(own, "1gbit"))
    except MissingRunError:
        return headline.published, NOT_RUN, code(headline.study)
    return headline.published, "reproduced" if holds else "refuted", figure


def _runs(name: str, runs: Sequence[TrainRecord]) -> list[TrainRecord]:
    """Returns the records of a study's cases; one of other length counts if it has a dense run."""
    study = STUDIES[name]
    own = [
        run
        for run in runs
        if (run.workload_spec, run.workers) == (study.workload, study.workers)
        and run.spec in study.cases
    ]
    lengths = {run.steps for run in own if run.spec == BASELINE}
    steps = study.steps if study.steps in lengths else max(lengths, key=lambda n: n or 0, default=0)
    return list({(r.spec, r.seed, r.rate, r.status): r for r in own if r.steps == steps}.values())


def _is_run(runs: Sequence[TrainRecord]) -> bool:
    """Returns whether most of GRACE's methods have a record: other studies share some cases."""
    specs = {run.spec for run in runs if run.status == "done"}
    return len(specs & set(GRACE_METHODS.values())) > len(GRACE_METHODS) // 2


def _task(task: str, runs: Sequence[TrainRecord]) -> list[str]:
    own = _runs(task, runs)
    model = STUDIES[task].summary.partition(" ones, on ")[2]
    heading = f"### {model[0].upper()}{model[1:]}"
    if not _is_run(own):
        return [heading, f"{NOT_RUN.capitalize()}: `{task}`."]
    missing = [n for n, spec in GRACE_METHODS.items() if spec not in {r.spec for r in own}]
    tables = [
        f"{human.rate(rate)}:\n\n{grid_table(study_grid([r for r in own if r.rate == rate]))}"
        for rate in RATES
    ]
    left = [f"Not run: {', '.join(missing)}."] if missing else []
    return [
        heading,
        f"{own[0].workload}, {own[0].workers} workers, {own[0].steps:,} steps.",
        f"![Quality, bytes and speed of every method]({task}.svg)",
        *left,
        fold("Tables at 25, 10 and 1 Gbit/s", "\n\n".join(tables)),
    ]


def _properties(name: str, case: str) -> tuple[str, ...]:
    spec = case.partition("@")[0].strip()
    codec = parse(spec)
    assert isinstance(codec, Compressor)
    row = next(row for row in rows() if row.name == read_settings(spec)[0])
    kinds = [word for word in ("unbiased", "contraction") if getattr(codec.traits(), word)]
    both = name in WITH_FEEDBACK and any(c.startswith(f"{spec} @") for c in WITHOUT_FEEDBACK)
    feedback = "on and off" if both else "on" if name in WITH_FEEDBACK else "off"
    random = "yes" if _draws(codec) else "no"
    property_text = " and ".join(kinds) or "neither"
    return name, code(spec), row.family, random, property_text, row.memory, feedback


def _draws(codec: Compressor) -> bool:
    """Returns whether messages of one tensor differ between steps."""
    x = measure.noise()
    shape = tuple(x.shape)
    decoded = [codec.decode(codec.encode(x, EncodeContext(shape, step=step))) for step in range(2)]
    return not torch.equal(*decoded)


def _latency(results: Path) -> list[str]:
    parts = []
    for path in sorted(results.glob("kernels-*.jsonl")):
        records = [r for r in read([path]) if isinstance(r, KernelRecord) and r.status == "done"]
        if path.stem.endswith("threads") or not records:
            continue
        sizes = sorted({record.numel for record in records})
        own = {(r.method, r.numel): r for r in reversed(records)}
        columns = [f"{what} {size:.0e}" for size in sizes for what in ("encode", "decode")]
        lines = [_latency_row(n, spec, sizes, own) for n, spec in GRACE_METHODS.items()]
        parts += [f"On {records[0].device}:", table(("method", *columns), lines)]
    return parts


def _latency_row(
    name: str, case: str, sizes: Sequence[int], records: dict[tuple[str, int], KernelRecord]
) -> list[str]:
    method = read_settings(case.partition("@")[0].strip())[0]
    cells = [name]
    for size in sizes:
        record = records.get((method, size))
        cells += (
            [NOT_RUN] * 2
            if record is None
            else [
                human.duration_ms(record.encode_us / 1e3),
                human.duration_ms(record.decode_us / 1e3),
            ]
        )
    return cells
