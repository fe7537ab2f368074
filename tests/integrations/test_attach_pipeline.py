"""Compressed messages between pipeline stages, on two to four real processes."""

from typing import Any

import pipeline_jobs as jobs
import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.integrations.pipeline_private import check_version
from gradwire.stages.message import HEADER_BYTES, LEAST_BYTES
from processes import Ranks

M = jobs.MICROBATCHES
DENSE = jobs.ROWS // M * jobs.WIDTH * 4
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_compression_all_schedules_are_what_torch_does(
    two_ranks: Ranks, schedule: str
) -> None:
    for same, back, _, messages in two_ranks.run(jobs.identity_job, schedule):
        assert same
        assert back, "detach should return to plain messages"
        assert messages


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bytes_are_messages_times_their_length(four_ranks: Ranks, schedule: str) -> None:
    results = four_ranks.run(jobs.identity_job, schedule)
    for rank, (same, back, sent, messages) in enumerate(results):
        assert same
        assert back
        boundaries = 1 if rank in (0, 3) else 2
        assert messages == 3 * M * boundaries
        assert sent == messages * (HEADER_BYTES + DENSE)
    # Both directions of all three boundaries.
    assert sum(sent for *_, sent, _ in results) == 3 * 3 * 2 * M * (HEADER_BYTES + DENSE)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_int8_both_ways_keeps_gradients_within_a_percent(two_ranks: Ranks, schedule: str) -> None:
    for error, stats in two_ranks.run(jobs.error_job, schedule, "int8"):
        assert 0 < error < 0.01
        assert stats["ratio"] == 1.5, "messages are short here, and 256 bytes at least"
        for end in stats["boundaries"].values():
            assert end["method"] == "int8"
            if end["relative_error"] is not None:
                assert 0.001 < end["relative_error"] < 0.01


@pytest.mark.parametrize("spec", ["int4", "qsgd:bits=8", "topk:ratio=0.5", "randomk:ratio=0.5"])
def test_methods_have_the_error_they_should(two_ranks: Ranks, spec: str) -> None:
    errors = [error for error, _ in two_ranks.run(jobs.error_job, "1f1b", spec)]
    assert all(0 < error < 1 for error in errors)
    if spec in ("int4", "qsgd:bits=8"):
        assert max(errors) < 0.2


def test_masks_travel_as_they_are_and_missing_gradients_are_zeros(two_ranks: Ranks) -> None:
    for same, stats in two_ranks.run(jobs.two_tensors_job):
        assert same
        assert stats["steps"] == 2


ORDERS = [
    [*range(16)],
    [*range(15, -1, -1)],
    [*range(8, 24)],
    [3, 17, 5, 9, 20, 11, 0, 2, 23, 1, 4, 6, 7, 8, 10, 12],
    [3] * 4 + [*range(12)],
]


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_both_ends_keep_the_same_of_every_sample(four_ranks: Ranks, values: str) -> None:
    results = four_ranks.run(jobs.samples_job, ORDERS, values)
    for lower in range(3):
        name = f"stages {lower} and {lower + 1}, activations"
        sender, receiver = results[lower][0][name], results[lower + 1][0][name]
        assert sender.keys() == receiver.keys() == set(range(24))
        for number, row in sender.items():
            assert torch.equal(row, receiver[number])
            assert row.dtype == getattr(torch, {"fp32": "float32", "fp16": "float16"}[values])
    dense, seen = results[0][2][0], results[0][2][1]
    assert dense == M * (HEADER_BYTES + DENSE), "a sample that is new is sent as it is"
    assert seen == M * LEAST_BYTES
    assert dense > results[0][2][2] > seen, "half of the third step's micro-batches are new"


@pytest.mark.parametrize(("memory", "controller"), [(None, None), ("samples", None), (None, "g")])
def test_a_resumed_run_goes_on_bitwise(
    two_ranks: Ranks, memory: str | None, controller: str | None
) -> None:
    assert all(two_ranks.run(jobs.resume_job, memory, controller))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("rows", "width"), [(8, jobs.WIDTH), (18, jobs.WIDTH), (3, jobs.WIDTH)])
def test_a_batch_of_another_shape_is_a_named_error_on_all_ranks(
    two_ranks: Ranks, schedule: str, rows: int, width: int
) -> None:
    results = two_ranks.run(jobs.changed_shape_job, schedule, rows, width)
    for (kind, text), (again, _) in results:
        assert kind == "ConfigError", text
        assert "the batch has changed: " in text
        assert f"from (16, 24) of float32 to ({rows}, 24) of float32" in text
        assert again == "PeerError"


def test_all_of_four_ranks_learn_of_another_shape(four_ranks: Ranks) -> None:
    for (kind, text), _ in four_ranks.run(jobs.changed_shape_job, "1f1b", 8, jobs.WIDTH):
        assert kind == "ConfigError"
        assert "from (16, 24) of float32 to (8, 24) of float32" in text


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_stage_that_raises_ends_the_others_with_its_reason(
    four_ranks: Ranks, failing: int
) -> None:
    results = four_ranks.run(jobs.failing_stage_job, failing)
    for rank, (kind, text) in enumerate(results):
        assert kind == ("torch: RuntimeError" if rank == failing else "PeerError"), text
        wanted = "failed to run forward" if rank == failing else f"stage {failing} failed: "
        assert wanted in text
        assert rank == failing or "ValueError: no such token" in text


def test_a_rank_that_is_lost_is_a_named_error(two_ranks: Ranks) -> None:
    (kind, text), (other, _) = two_ranks.run(jobs.lost_rank_job)
    assert (kind, other) == ("PeerError", "SystemExit"), text
    assert "rank 0 has lost a neighbour in step 2" in text


def test_declared_shapes_that_differ_are_found_before_the_first_message(two_ranks: Ranks) -> None:
    for kind, text in two_ranks.run(jobs.static_shapes_job):
        assert kind == "ConfigError"
        assert "stages 0 and 1 disagree on shapes" in text
        assert "(4, 24) of float32" in text
        assert "(4, 32) of float32" in text


def test_ranks_that_differ_raise_on_all(two_ranks: Ranks) -> None:
    for found in two_ranks.run(jobs.unlike_settings_job):
        kinds, texts = [kind for kind, _ in found], [text for _, text in found]
        assert kinds == ["ConfigError"] * 6, texts
        for text, part in zip(
            texts,
            [
                "activations[0].class",
                "seed: 0",
                "memory",
                "checksum",
                "activations",
                "call samples",
            ],
            strict=True,
        ):
            assert part in text


def test_evaluation_switch_and_wrong_calls(two_ranks: Ranks) -> None:
    results = two_ranks.run(jobs.unusual_job)
    assert [found["evaluated"] for found in results] == [0, M]
    for found in results:
        assert "attached already" in found["twice"][1]
        assert "no state of a pipeline" in found["state"][1]
        assert "memory='samples'" in found["no memory"][1]
        assert "detached" in found["detached"][1]
        assert found["unchanged"]
        assert found["rows"][0] == "ConfigError"
        assert "one number per row" in found["rows"][1]
    assert results[0]["before"] == results[0]["after"], "the first stage sends no gradients"
    assert results[1]["after"] == M * (HEADER_BYTES + DENSE) > results[1]["before"]


@pytest.mark.parametrize(("byte_s", "last"), [(1e-3, "int4"), (0.0, "none")])
def test_gravac_compresses_where_the_link_is_slow(
    two_ranks: Ranks, byte_s: float, last: str
) -> None:
    results = two_ranks.run(jobs.controller_job, 8, byte_s)
    (here, _), (there, _) = results
    for mine, others in zip(here, there, strict=True):
        assert sorted(mine) == sorted(others), "both ends change at one step"
    first, final = results[0][0][0], results[0][0][-1]
    assert first == ["gradients none", "activations none"]
    assert final == [f"gradients {'int8' if byte_s else 'none'}", f"activations {last}"]
    assert results[0][1]["auxiliary_bytes"] > 0


def test_old_versions_of_torch_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"attach_pipeline needs torch 2.7 or newer, got 2.6.0"):
        check_version("2.6.0")
    check_version("2.7.0")


def test_lone_stages_and_other_objects_are_refused() -> None:
    import gradwire

    cases: list[Any] = [None, torch.nn.Linear(2, 2), [3], []]
    for wrong in cases:
        with pytest.raises(ConfigError, match=r"attach_pipeline: (expected|got)"):
            gradwire.attach_pipeline(wrong)
