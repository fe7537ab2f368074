"""The epochs and learning rates that a benchmark reports to controllers."""

import pytest

from gradwire.bench.workloads.base import Epochs, Workload, parse_workload


def test_an_epoch_ends_when_all_examples_were_seen() -> None:
    workload = parse_workload("resnet9-tiny:synthetic=true")
    each = workload.examples() // (2 * workload.batch_size)
    assert each > 1
    epochs = Epochs(workload, 2, 10 * each)
    ends = [step for step in range(1, 3 * each + 1) if epochs.ended(step) is not None]
    assert ends == [each, 2 * each, 3 * each]


@pytest.mark.parametrize(
    ("rates", "reported"),
    [
        ((1.0, 0.9, 0.8, 0.6), [1.0, 1.0, 1.0]),
        ((1.0, 1.0, 0.1, 0.1), [1.0, 0.1, 0.1]),
        ((0.2, 1.0, 0.6, 0.5), [1.0, 1.0, 0.5]),
    ],
)
def test_a_slow_decline_is_no_decay(
    rates: tuple[float, ...], reported: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = parse_workload("mlp-tiny")
    each = max(1, workload.examples() // workload.batch_size)

    def rate_at(_: Workload, progress: float) -> float:
        return rates[min(3, int(4 * progress))]

    monkeypatch.setattr(type(workload), "learning_rate_at", rate_at)
    epochs = Epochs(workload, 1, 4 * each)
    assert [epochs.ended(each * number) for number in (1, 2, 3)] == reported
