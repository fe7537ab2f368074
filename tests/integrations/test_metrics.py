"""`metrics` describes the last step alone, agrees with `stats`, and costs no collective."""

from typing import Any

import metrics_jobs as jobs
import pytest

from gradwire.comm.profiler_ranges import profiler_range
from gradwire.errors import ConfigError
from processes import Ranks

COUNTS = ("sent_bytes", "received_bytes", "dense_bytes", "calls")
TIMES = {"encode_s", "wire_s", "decode_s", "exposed_s", "hidden_s"}


def assert_sums_to(rows: jobs.Rows, stats: dict[str, Any], prefix: str = "") -> None:
    for name in COUNTS:
        assert sum(row[f"{prefix}{name}"] for row in rows) == stats[name], name


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_steps_of_ddp_sum_to_the_statistics(two_ranks: Ranks, spec: str) -> None:
    for (before, *rows), stats in two_ranks.run(jobs.ddp_rows, spec, 3, {}):
        assert before == {}
        assert_sums_to(rows, stats)
        assert [row["step"] for row in rows] == [1, 2, 3]
        for name in ("encode_s", "wire_s", "decode_s"):
            assert sum(row[name] for row in rows) == pytest.approx(stats[name])
        assert sum(row["exposed_s"] for row in rows) == pytest.approx(stats["waited_s"])
        assert all(row["step_s"] > row["exposed_s"] for row in rows[1:])


def test_errors_are_in_the_first_step_and_in_one_of_a_hundred(two_ranks: Ranks) -> None:
    for (_, *rows), stats in two_ranks.run(jobs.ddp_rows, "topk:ratio=0.1", 102, {}):
        assert [i for i, row in enumerate(rows) if "residual_norm" in row] == [0, 100]
        assert 0 < rows[0]["relative_error"] < 1
        assert rows[100]["relative_error"] == pytest.approx(stats["relative_error"])


def test_without_our_hook_bytes_are_known_and_times_are_not(two_ranks: Ranks) -> None:
    for (_, *rows), stats in two_ranks.run(jobs.ddp_rows, "none", 3, {}):
        assert_sums_to(rows, stats)
        assert not TIMES & rows[-1].keys()
        assert rows[-1]["bits_per_element"] == 32


def test_the_setting_of_a_controller_shows_as_bits(two_ranks: Ranks) -> None:
    options = {"controller": "schedule:first=0.5,last=0.01,stages=2,length=4"}
    for (_, *rows), _ in two_ranks.run(jobs.ddp_rows, "topk:ratio=0.5", 4, options):
        assert rows[-1]["bits_per_element"] < rows[0]["bits_per_element"] / 3


@pytest.mark.parametrize("kind", ["fsdp", "wrap_optimizer"])
def test_other_handles_have_the_same_numbers(two_ranks: Ranks, kind: str) -> None:
    for rows, stats in two_ranks.run(jobs.other_rows, kind):
        assert_sums_to(rows, stats, "gradwire/")
        last = rows[-1]
        parts = sum(last[f"gradwire/{name}"] for name in ("encode_s", "wire_s", "decode_s"))
        assert last["gradwire/exposed_s"] == pytest.approx(parts)


def test_a_local_method_counts_nothing_between_syncs(two_ranks: Ranks) -> None:
    for rows, stats in two_ranks.run(jobs.other_rows, "local"):
        assert_sums_to(rows, stats, "gradwire/")
        assert [row["gradwire/sent_bytes"] > 0 for row in rows] == [False, True, False]
        assert [row["gradwire/syncs"] for row in rows] == [0, 1, 1]
        assert ["gradwire/residual_norm" in row for row in rows] == [False, True, False]


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_trace_names_encode_wire_and_decode(two_ranks: Ranks, in_thread: bool) -> None:
    names = {"gradwire::encode", "gradwire::wire", "gradwire::decode"}
    assert two_ranks.run(jobs.traced, in_thread) == [names, names]


def test_without_a_profiler_nothing_is_recorded() -> None:
    assert profiler_range("encode") is profiler_range("wire")


def test_lines_that_are_alike_on_all_ranks_come_from_rank_0(two_ranks: Ranks) -> None:
    lines, others = two_ranks.run(jobs.logged_lines)
    assert [line.split()[0] for line in lines] == ["attached:", "a", "switch:"]
    assert others == []


def test_a_prefix_is_text(two_ranks: Ranks) -> None:
    from gradwire.comm.meter import Meter
    from gradwire.engine.last_step import LastStep

    with pytest.raises(ConfigError, match="prefix must be a string, got 3"):
        LastStep(Meter(), "all").numbers(3, 0, [], 0)
