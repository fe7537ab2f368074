"""`gradwire.doctor` measures real steps, and says no more than its intervals allow."""

import re

import doctor_jobs as jobs
import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.perfmodel.doctor import diagnose
from gradwire.perfmodel.intervals import difference_interval, ratio_interval
from gradwire.perfmodel.link_table import LinkRow, LinkTable
from gradwire.perfmodel.step_watch import Trial, Watched
from processes import Ranks

ALIKE = LinkTable((LinkRow(0, 1, 1e-4, 1e9), LinkRow(1, 0, 1e-4, 1.1e9)))


def spread(middle: float, noise: float = 0.02) -> tuple[float, ...]:
    """Returns twelve times around a middle."""
    return tuple(middle * (1 + noise * (i - 5.5) / 5.5) for i in range(12))


def watched(
    step: float, alone: float, method: float, noise: float = 0.02, **others: bool
) -> Watched:
    trials = (
        Trial("none", spread(step, noise)),
        Trial("fp16", spread((step + alone) / 2, noise)),
        Trial("topk:ratio=0.01", spread(method, noise), 0.8, 1e4),
    )
    return Watched(
        kind="DDP",
        parameters=(torch.zeros(512, 512),),
        backend="gloo",
        workers=2,
        links=ALIKE,
        exchange_s=spread(step, noise),
        alone_s=spread(alone, noise),
        rank_alone_s=(alone, alone),
        trials=trials,
        adaptive=others.get("adaptive", False),
    )


def test_a_slow_link_is_named_with_the_line_to_add() -> None:
    found = diagnose(watched(step=1.0, alone=0.2, method=0.25))
    assert found.bottleneck == "link"
    assert found.line == 'link = gradwire.attach(model, "topk:ratio=0.01")'
    # Against 16 bits, which take 0.6 s, not against 32.
    assert found.choice is not None
    assert found.choice.speedup.value == pytest.approx(0.6 / 0.25)
    assert found.choice.speedup.low < 2.4 < found.choice.speedup.high


def test_a_hidden_exchange_is_no_reason_to_compress() -> None:
    found = diagnose(watched(step=0.201, alone=0.2, method=0.2, noise=0.001))
    assert found.bottleneck == "compute"
    assert found.line is None
    assert "Do not compress here" in str(found)
    assert re.search(
        r"^step: .* ms.*, of which training waits .* for the exchange$", str(found), re.M
    )


def test_noise_is_not_taken_for_a_result() -> None:
    found = diagnose(watched(step=1.0, alone=0.95, method=0.9, noise=0.6))
    assert found.bottleneck == "unknown"
    assert found.line is None


def test_a_method_that_the_optimiser_does_not_bear_is_not_advised() -> None:
    found = diagnose(watched(step=1.0, alone=0.2, method=0.25, adaptive=True))
    assert found.line is None
    assert "the risk of topk:ratio=0.01 to accuracy is high" in str(found)


def test_links_that_differ_are_named_with_their_direction() -> None:
    rows = [LinkRow(a, b, 1e-3, 1e9) for a, b in ((0, 1), (1, 0), (1, 2), (0, 2), (2, 0))]
    table = LinkTable((*rows, LinkRow(2, 1, 1e-3, 1e8)))
    text = "\n".join(table.lines())
    assert "differ 10.0-fold" in text
    assert "slowest: rank 2 to 1: 100mbit, 1 ms" in text
    assert "asymmetric: the way back, rank 1 to 2: 1gbit" in text


def test_an_interval_contains_what_repetitions_give() -> None:
    assert difference_interval(spread(2.0), spread(1.0)).value == pytest.approx(1.0)
    wide, narrow = (ratio_interval(spread(2.0, n), spread(1.0, n)) for n in (0.3, 0.01))
    assert wide.low < narrow.low <= 2.0 <= narrow.high < wide.high
    assert ratio_interval((2.0,), (1.0,)) == (2.0, 2.0, 2.0)


def test_a_running_job_is_diagnosed_and_left_as_it_was(two_ranks: Ranks) -> None:
    (text, tried, untouched, stateless), other = two_ranks.run(jobs.diagnosed)
    assert text == other[0]
    assert sorted(tried) == ["int4", "powersgd:rank=4", "topk:ratio=0.01"]
    assert untouched
    assert stateless


def test_fsdp_steps_are_watched_too(two_ranks: Ranks) -> None:
    found, _ = two_ranks.run(jobs.watched, "fsdp")
    assert found.kind == "FSDP2"
    assert found.adaptive
    assert [trial.refused for trial in found.trials] == [None, None]
    assert 0 < found.trials[1].relative_error < 1
    assert found.trials[1].sent_bytes < found.trials[0].sent_bytes


def test_a_script_that_compresses_already_is_only_timed(two_ranks: Ranks) -> None:
    found, _ = two_ranks.run(jobs.watched, "hooked")
    assert len(found.exchange_s) == len(found.alone_s) >= 3
    assert all("hook slot is taken" in str(trial.refused) for trial in found.trials)
    assert diagnose(found).line is None


def test_links_are_measured_both_ways(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(jobs.links)
    assert one == other
    assert [(row.source, row.target) for row in one.rows] == [(0, 1), (1, 0)]
    assert all(row.rate_bits > 1e6 and 0 < row.latency_s < 1 for row in one.rows)


def test_wrong_arguments_are_refused() -> None:
    import gradwire

    with pytest.raises(ConfigError, match="doctor: expected a DistributedDataParallel, got Linear"):
        gradwire.doctor(torch.nn.Linear(2, 2), jobs.loss, None)  # type: ignore[arg-type]
