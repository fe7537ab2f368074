"""Cases of decentralised methods: parsing, training, and their clock."""

import pytest

from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.simulated.base import train
from gradwire.bench.simulated.trainer import local_trainer
from gradwire.bench.studies.definitions import STUDIES
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError

CHOCO = "topk:ratio=0.1 @ local=(choco:topology=torus,gamma=0.3)"


def case_of(text: str) -> LocalCase:
    case = parse_case(text)
    assert isinstance(case, LocalCase)
    return case


@pytest.mark.parametrize(
    ("text", "senders", "messages"),
    [
        ("none @ local=dsgd", 3, 1),
        ("none @ local=(dsgd:topology=one_peer,sync_every=2)", 2, 1),
        (CHOCO, 5, 1),
        ("topk:ratio=0.1 @ local=(cgt:gamma=0.1,alpha=0.5,topology=exponential)", 5, 2),
        ("efsign @ local=(beer:gamma=0.1,topology=star)", 16, 2),
    ],
)
def test_every_method_has_a_case(text: str, senders: int, messages: int) -> None:
    settings = case_of(text).settings()
    assert (settings.senders(16), settings.messages, settings.kind) == (
        senders,
        messages,
        "neighbors",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:ratio=0.1 @ local=choco", r"choco: missing parameter \['gamma'\]"),
        ("topk:ratio=0.1 @ local=dsgd", "dsgd: sends parameters uncompressed"),
        ("efsign @ local=(choco:gamma=0.1,topology=line)", "no topology named 'line'"),
        ("efsign @ local=(choco:gamma=2)", r"ChocoSGD: gamma must be in \(0, 1\], got 2"),
        ("efsign @ local=(cgt:gamma=0.1,sync_every=2)", "sync_every must be 1, got 2"),
        ("powersgd:rank=1 @ local=(cgt:gamma=0.1)", "CGT: powersgd defines its own rounds"),
        ("efsign @ local=(choco:gamma=0.1), exchange=gather", "sends to neighbors, so exchange"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_case(text)


def test_choco_trains_a_network_on_images() -> None:
    """ResNet-9 of a sixteenth of the width, on synthetic images: 10 classes, 16 images a worker."""
    workload = parse_workload("resnet9-tiny")
    with local_trainer(workload, case_of(CHOCO.replace("torus", "ring")), 4, seed=0) as trainer:
        *_, last = train(trainer, steps=40, evaluate_every=40)
        assert trainer.members[0].stats()["ratio"] > 4
    assert last.evaluation.metric > 0.9


def test_the_studies_have_three_topologies_and_sixteen_workers() -> None:
    for name in ("decentralized", "decentralized-ptb"):
        study = STUDIES[name]
        assert study.workers == 16
        for topology in ("ring", "torus", "exponential"):
            named = [case for case in study.cases if f"topology={topology}" in case]
            assert {case_of(case).local.partition(":")[0] for case in named} == {
                "dsgd",
                "choco",
                "cgt",
            }
