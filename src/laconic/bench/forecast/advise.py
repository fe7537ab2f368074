"""`laconic advise`: whether compression pays for a model that is not running yet."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from laconic.bench.forecast.records import Setting
from laconic.bench.forecast.simulate import Links
from laconic.bench.forecast.subject import Subject, plan_of
from laconic.bench.machine import machine_facts
from laconic.bench.records.files import append
from laconic.errors import ConfigError
from laconic.forecast.advice import BITS16, FP32, Advice, advice, weigh
from laconic.forecast.host import cores_each
from laconic.network.rate import format_rate


def advise_on(subject: Subject, cases: Sequence[str], workers: int, links: Links) -> Advice:
    """Methods ranked by their predicted step, each worker alone on a machine like this one."""
    if workers < 2:
        raise ConfigError(f"advise: workers must be at least 2, got {workers}")
    network = links.network()
    names = dict.fromkeys((FP32, BITS16, *cases))
    plans = {name: plan_of(name, subject.tensors, workers) for name in names}
    cores = cores_each(1, subject.device)
    options = weigh(plans, subject.compute, subject.tensors, workers, network, cores)
    setting = (
        f"{subject.title}: {subject.parameters / 1e6:.3g} M parameters on {subject.device}, "
        f"{subject.compute.compute_s * 1e3:.3g} ms a step without exchange; {workers} workers, "
        f"links of {network.link.words()}"
    )
    return advice(setting, options)


def write_advice(
    path: Path, subject: Subject, workers: int, links: Links, found: Advice, command: str
) -> None:
    """Adds one forecast record an option to a file."""
    setting = Setting(
        subject.title,
        subject.parameters,
        format_rate(links.rate_bits),
        links.latency_s * 1e3,
        str(subject.device),
        command,
        machine_facts(),
    )
    for option in found.options:
        record = setting.record(option.spec, option.exchange, workers, option.prediction)
        risk = option.risk
        judged = replace(
            record,
            relative_error=risk.relative_error,
            risk=risk.level,
            advised=option is found.choice,
        )
        append(path, judged)
