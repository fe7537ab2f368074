"""Step observers: the order of the engine's calls, and statistics averaged over ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradwire.engine
from gradwire.comm.simulated import Simulated
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.engine.observer import StepObserver
from gradwire.engine.piggyback import Piggyback
from gradwire.engine.plan import Plan
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from lockstep import noise

WORLD_SIZE = 4
SHAPES = {"a": (40, 30), "b": (7,), "c": (64, 32)}


class Recorder(StepObserver):
    """Records the calls of an engine, and sends the rank and the number of names along."""

    def __init__(self, rank: int, skipped_rounds: float = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.statistics: list[Tensor | None] = []
        self._rank, self._skipped_rounds = rank, skipped_rounds

    @property
    def pending(self) -> bool:
        return False

    @property
    def is_measuring(self) -> bool:
        return False

    @property
    def is_idle(self) -> bool:
        return False

    def check_plan(self, plan: Plan) -> None:
        self.calls.append(("check_plan", plan.describe()["spec"]))
        if plan.is_dense:
            raise ConfigError("recorder: a dense plan")

    def plan_changed(self, plan: Plan, lanes: Mapping[str, Lane], step: int) -> None:
        self.calls.append(("plan_changed", plan.describe()["spec"], [*lanes], step))

    def bucket_started(
        self, names: Sequence[str], grads: Sequence[Tensor], loss_scale: float
    ) -> None:
        self.calls.append(("bucket_started", [*names], [float(grad.sum()) for grad in grads]))
        self.loss_scale = loss_scale

    def piggyback(self, names: Sequence[str], device: torch.device) -> Piggyback | None:
        self.calls.append(("piggyback", [*names]))
        rounds_left = self._skipped_rounds

        def numbers() -> Tensor | None:
            nonlocal rounds_left
            rounds_left -= 1
            return torch.tensor([float(self._rank), len(names)]) if rounds_left < 0 else None

        return Piggyback(numbers, WORLD_SIZE)

    def bucket_ended(self, names: Sequence[str], statistics: Tensor | None) -> None:
        self.calls.append(("bucket_ended", [*names]))
        self.statistics.append(statistics)

    def step_ended(self) -> None:
        self.calls.append(("step_ended",))

    def step_committed(self, step: int, *, counts: bool) -> None:
        self.calls.append(("step_committed", step, counts))

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        self.calls.append(("learning_rate_changed", step, before, after))

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        self.calls.append(("epoch_ended", step, learning_rate))

    def world_size_changed(self) -> None:
        self.calls.append(("world_size_changed",))

    def stats(self) -> dict[str, object]:
        return {"recorded": len(self.calls)}

    def state_dict(self) -> dict[str, object]:
        return {}

    def adopt_plan(self, state: object) -> None: ...

    def load_state_dict(self, state: object) -> None: ...


class Workers:
    """Engines on simulated ranks, with or without observers."""

    def __init__(
        self,
        spec: str,
        exchange: str = "auto",
        observer: Callable[[int], StepObserver] | None = Recorder,
    ) -> None:
        tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        plan = make_plan(spec, None, exchange, tensors.values(), WORLD_SIZE)
        self.engines = [Engine(plan, tensors, rank, WORLD_SIZE, 0) for rank in range(WORLD_SIZE)]
        self.network = Simulated(WORLD_SIZE)
        for engine in self.engines if observer is not None else ():
            engine.observer = observer(engine.rank)

    def step(self, *buckets: list[str], seed: int = 0, bad: float = 0.0) -> list[list[Tensor]]:
        """Exchanges the buckets in this order; returns the means by rank. Rank 1 adds `bad`."""
        grads = [gradients(rank, seed) for rank in range(WORLD_SIZE)]
        grads[1]["a"][3, 3] += bad
        for names in buckets or [[*SHAPES]]:
            rows = [[own[name] for name in names] for own in grads]
            pairs = zip(self.engines, rows, strict=True)
            self.network.run([engine.bucket_program(names, row) for engine, row in pairs])
        for engine in self.engines:
            engine.end_step()
            engine.commit_step()
        return [[*own.values()] for own in grads]

    def observers(self) -> list[Recorder]:
        found = [engine.observer for engine in self.engines]
        return [observer for observer in found if isinstance(observer, Recorder)]


def gradients(rank: int, seed: int) -> dict[str, Tensor]:
    return {n: noise(*shape, seed=97 * seed + rank) for n, shape in SHAPES.items()}


def names_of(calls: Sequence[tuple[object, ...]]) -> list[object]:
    return [call[0] for call in calls]


BUCKET = ["bucket_started", "piggyback", "bucket_ended"]


def test_calls_come_in_the_same_order_on_all_ranks() -> None:
    workers = Workers("topk:ratio=0.1")
    workers.step(["c", "b"], ["a"])
    workers.step(["c", "b"], ["a"], seed=1)
    for observer in workers.observers():
        assert names_of(observer.calls) == 2 * [*BUCKET, *BUCKET, "step_ended", "step_committed"]
        buckets = [call[1] for call in observer.calls if len(call) > 1 and call[0] in BUCKET]
        assert buckets == 2 * [*[["c", "b"]] * 3, *[["a"]] * 3]
        committed = [call[1:] for call in observer.calls if call[0] == "step_committed"]
        assert committed == [(1, True), (2, True)]


def test_a_bucket_starts_with_the_gradients_of_this_rank() -> None:
    workers = Workers("topk:ratio=0.1")
    workers.step(["a", "b"])
    for rank, observer in enumerate(workers.observers()):
        own = gradients(rank, 0)
        expected = [float(own[name].sum()) for name in ("a", "b")]
        assert observer.calls[0] == ("bucket_started", ["a", "b"], expected)
        assert observer.loss_scale == 1.0


def test_the_loss_scale_is_passed_along() -> None:
    workers = Workers("topk:ratio=0.1")
    for engine in workers.engines:
        engine.loss_scale_changed(8.0)
    workers.step()
    assert [observer.loss_scale for observer in workers.observers()] == [8.0] * WORLD_SIZE


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "none"])
def test_a_discarded_step_does_not_count(spec: str, bad: float) -> None:
    """Without an observer a dense plan needs no flag; with one, all ranks must know."""
    workers = Workers(spec)
    workers.step()
    workers.step(bad=bad, seed=1)
    workers.step(seed=2)
    for observer in workers.observers():
        assert names_of(observer.calls) == 3 * [*BUCKET, "step_ended", "step_committed"]
        committed = [call[1:] for call in observer.calls if call[0] == "step_committed"]
        assert committed == [(1, True), (1, False), (2, True)]


SETUPS = [
    pytest.param("none", "mean", 0, id="float32 sums"),
    pytest.param("fp16", "mean", 1, id="16-bit sums"),
    pytest.param("topk:ratio=0.1", "gather", 0, id="gather"),
    pytest.param("threshold:value=0.5", "gather", 0, id="variable length"),
    pytest.param("qsgd:bits=8", "sharded", 0, id="sharded"),
    pytest.param("topk:ratio=0.1", "leader", 1, id="leader"),
    pytest.param("powersgd:rank=2", "mean", 0, id="two rounds"),
    pytest.param("topk:ratio=0.1", "hierarchical:node=2,between=gather", 1, id="hierarchical"),
]
"""A method, an exchange, and the number of additional collectives for the statistics."""


@pytest.mark.parametrize(("spec", "exchange", "extra"), SETUPS)
def test_piggybacked_numbers_are_averaged_in_shared_collectives(
    spec: str, exchange: str, extra: int
) -> None:
    """The means of the gradients stay the same to the bit."""
    observed, plain = Workers(spec, exchange), Workers(spec, exchange, observer=None)
    for seed in range(2):
        for found, expected in zip(observed.step(seed=seed), plain.step(seed=seed), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for observer in observed.observers():
        for statistics in observer.statistics:
            assert statistics is not None
            assert statistics.dtype == torch.float32
            assert statistics.tolist() == [(0 + 1 + 2 + 3) / 4, len(SHAPES)]
        assert len(observer.statistics) == 2
    calls = [workers.network.meters[0].calls for workers in (observed, plain)]
    assert calls[0] - calls[1] == 2 * extra


def test_numbers_travel_in_the_first_round_in_which_they_are_known() -> None:
    workers = Workers("powersgd:rank=2", "mean", lambda rank: Recorder(rank, skipped_rounds=1))
    workers.step()
    for observer in workers.observers():
        [statistics] = observer.statistics
        assert statistics is not None
        assert statistics.tolist() == [1.5, len(SHAPES)]


def test_numbers_that_are_never_known_do_not_travel() -> None:
    workers = Workers("topk:ratio=0.1", observer=lambda rank: Recorder(rank, float("inf")))
    workers.step()
    assert [observer.statistics for observer in workers.observers()] == [[None]] * WORLD_SIZE


def test_a_switch_asks_the_observer_first() -> None:
    workers = Workers("topk:ratio=0.1")
    workers.step()
    [engine, *_], [observer, *_] = workers.engines, workers.observers()
    observer.calls.clear()
    before = engine.plan
    dense = make_plan("none", None, "auto", engine.tensors.values(), WORLD_SIZE)
    with pytest.raises(ConfigError, match="recorder: a dense plan"):
        engine.switch(dense)
    assert engine.plan is before
    other = make_plan("topk:ratio=0.2", None, "auto", engine.tensors.values(), WORLD_SIZE)
    engine.switch(other)
    assert engine.plan is other
    assert observer.calls == [
        ("check_plan", "none"),
        ("check_plan", "topk:ratio=0.2"),
        ("plan_changed", "topk:ratio=0.2", [*SHAPES], 1),
    ]


def test_other_events_are_passed_on_with_the_step() -> None:
    workers = Workers("topk:ratio=0.1")
    workers.step()
    [engine, *_], [observer, *_] = workers.engines, workers.observers()
    observer.calls.clear()
    engine.learning_rate_changed(0.1, 0.05)
    engine.epoch_ended(None)
    engine.epoch_ended(0.05)
    assert observer.calls == [
        ("learning_rate_changed", 1, 0.1, 0.05),
        ("epoch_ended", 1, None),
        ("epoch_ended", 1, 0.05),
    ]
    assert engine.stats(workers.network.meters[0])["controller"] == {"recorded": 3}


def test_an_engine_without_an_observer_has_no_controller_statistics() -> None:
    workers = Workers("topk:ratio=0.1", observer=None)
    workers.step()
    assert "controller" not in workers.engines[0].stats(workers.network.meters[0])


def test_the_engine_does_not_import_control() -> None:
    files = [*Path(gradwire.engine.__path__[0]).glob("*.py")]
    assert len(files) > 5
    assert not [file.name for file in files if "gradwire.control" in file.read_text()]
