"""The studies of Byzantine workers: every attack meets every aggregation, beside honest runs."""

import pytest

from gradwire.bench.cases.parse import attacks_of
from gradwire.bench.predictions.measured_model import plan_of
from gradwire.bench.studies.byzantine import AGGREGATIONS, ATTACKS, BYZANTINE, byzantine
from gradwire.bench.workloads.base import parse_workload


def test_every_attack_meets_every_aggregation() -> None:
    study = BYZANTINE["byzantine"]
    for attack in (None, *ATTACKS):
        for aggregation in AGGREGATIONS:
            assert byzantine("none", aggregation, 2, attack, "side=update") in study.cases


@pytest.mark.parametrize("name", BYZANTINE)
def test_all_cases_have_enough_workers(name: str) -> None:
    study = BYZANTINE[name]
    liars = 3 if name == "byzantine-3" else 2
    for form in (study, study.smoke()):
        tensors = dict(parse_workload(study.smoke().workload).build().named_parameters())
        for case in form.cases:
            plan_of(case, tensors, form.workers)
            assert len(attacks_of(case, form.workers)) in (0, liars)
