"""Pages of measurements that are no study: tables of records, each behind a fold."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pages.markdown import GENERATED, fold
from pages.results import raw_tables, title


class Topic(NamedTuple):
    title: str
    summary: str
    files: tuple[str, ...]
    """Files of results/ without their suffix; a folder stands for all of its files."""


TOPICS: Mapping[str, Topic] = {
    "step-times.md": Topic(
        "Step times",
        "The time of a training step with real processes and shaped links, on CPUs and on a GPU.",
        ("step", "gpu-step", "gpu-step-mps", "resnet18-step", "gpt2-step", "scaling"),
    ),
    "kernels.md": Topic(
        "Kernels",
        "Encoding, decoding and a step with error feedback, against the traffic of memory.",
        ("kernels-cpu", "kernels-cpu-threads", "kernels-h200"),
    ),
    "integrations.md": Topic(
        "Cost of an integration",
        "Steps with `none` through every integration and inside trainers, against the same steps "
        "without Gradwire (`gradwire bench integrations --trainers`).",
        ("integrations",),
    ),
    "predictions.md": Topic(
        "Predicted and measured steps",
        "Predictions of the simulator beside steps of real processes.",
        ("validation", "validation-16-cores"),
    ),
    "controllers.md": Topic(
        "Controllers on real processes",
        "Autopilot and GraVAC on the testbed, on links that change, and two levels of a method.",
        ("adaptive",),
    ),
    "local-methods.md": Topic(
        "Local methods on real processes", "Steps between syncs on the testbed.", ("local",)
    ),
    "pipeline.md": Topic(
        "Pipeline stages",
        "Losses and bytes of a GPT whose stages send each other compressed messages.",
        ("pipeline",),
    ),
    "reliability.md": Topic(
        "Reliability",
        "Injected faults, the cost of guards, and hostile messages.",
        ("reliability",),
    ),
}


def titles() -> dict[str, str]:
    return {name: topic.title for name, topic in TOPICS.items()}


def texts(results: Path) -> dict[str, str]:
    """Returns the page of every topic, by its file name."""
    return {name: _page(topic, results) for name, topic in TOPICS.items()}


def _page(topic: Topic, results: Path) -> str:
    columns = "[What the columns mean](benchmarks.md)."
    parts = [GENERATED, f"# {topic.title}", f"{topic.summary} {columns}"]
    for path in files(topic, results):
        heading = title(path.relative_to(results))
        parts += [f"## {heading}", fold("Tables of all runs", raw_tables(path, results))]
    return "\n\n".join(parts) + "\n"


def files(topic: Topic, results: Path) -> list[Path]:
    """Returns the files of a topic that exist."""
    found = [results / f"{name}.jsonl" for name in topic.files]
    inside = [path for name in topic.files for path in sorted((results / name).glob("*.jsonl"))]
    return [path for path in [*found, *inside] if path.exists()]
