"""Non-finite gradients: all ranks see the flag, and no state keeps a trace of them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.engine.nonfinite import LARGE, NonFiniteGuard, StepVerdict, _range_on_device
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.simulation import Simulation, simulate
from gradwire.spec import compressor_classes, format_spec

SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
MEMORIES = ["residual", "momentum", "ef21", "ef21_sgdm", "lowbit"]
WORKERS = 3
SHAPES = {"a": (40, 30), "b": (1100, 3), "c": (7,)}


def gradients(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(WORKERS)
    ]


def with_bad_entry(step: int, bad: float, worker: int, name: str) -> list[dict[str, Tensor]]:
    grads = gradients(step)
    grads[worker][name].view(-1)[-1] = bad
    return grads


def simulation(spec: str, **options: object) -> Simulation:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return simulate(tensors, spec, workers=WORKERS, **options)  # type: ignore[arg-type]


def same(one: object, other: object) -> bool:
    """Compares nested states bitwise."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and all(same(v, other[k]) for k, v in one.items())
    return one == other


def check_leaves_no_trace(sim: Simulation, twin: Simulation, bad: float, name: str) -> None:
    """Compares a run of good, bad and good steps with one that has only the good steps."""
    sim.step(gradients(0))
    twin.step(gradients(0))
    before = sim.state_dict()
    means = sim.step(with_bad_entry(1, bad, 1, name))
    assert not means[name].isfinite().all()
    assert same(before, sim.state_dict())
    after, expected = sim.step(gradients(2)), twin.step(gradients(2))
    assert all(torch.equal(after[n], expected[n]) for n in SHAPES)
    assert (sim.stats()["steps"], sim.stats()["skipped"]) == (2, 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_step_leaves_no_trace_in_any_method(spec: str, bad: float) -> None:
    if gradwire.parse(spec).family == "dense":
        pytest.skip("uncompressed gradients are summed, and there is no state")
    check_leaves_no_trace(simulation(spec), simulation(spec), bad, "a")


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("exchange", ["gather", "sharded", "leader"])
@pytest.mark.parametrize("name", ["a", "c"])
def test_a_bad_step_leaves_no_trace_in_any_memory_and_exchange(
    memory: str, exchange: str, name: str
) -> None:
    sims = [simulation("topk:ratio=0.1", memory=memory, exchange=exchange) for _ in range(2)]
    check_leaves_no_trace(*sims, float("nan"), name)


@pytest.mark.parametrize("between", ["gather", "sharded", "leader"])
@pytest.mark.parametrize("node", [1, 3])
def test_a_bad_step_leaves_no_trace_in_any_node(between: str, node: int) -> None:
    exchange = f"hierarchical:node={node},between={between}"
    sims = [simulation("topk:ratio=0.1", exchange=exchange) for _ in range(2)]
    check_leaves_no_trace(*sims, float("nan"), "a")


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16"])
def test_dense_means_propagate_nonfinite_values(spec: str) -> None:
    sim = simulation(spec)
    assert not sim.step(with_bad_entry(0, float("inf"), 2, "a"))["a"].isfinite().all()
    assert all(mean.isfinite().all() for mean in sim.step(gradients(1)).values())


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "randomk:ratio=0.1", "signsgd", "powersgd"])
def test_every_gradient_of_the_bucket_becomes_nonfinite(spec: str) -> None:
    """A loss scaler notices, whichever gradient it checks."""
    means = simulation(spec).step(with_bad_entry(0, float("nan"), 0, "a"))
    assert all(not mean.isfinite().all() for mean in means.values())


def test_the_first_step_may_be_bad() -> None:
    sim, twin = simulation("powersgd"), simulation("powersgd")
    sim.step(with_bad_entry(0, float("nan"), 0, "a"))
    expected, means = twin.step(gradients(1)), sim.step(gradients(1))
    assert all(torch.equal(means[n], expected[n]) for n in SHAPES)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "none"])
def test_raise_raises_and_training_can_go_on(spec: str) -> None:
    sim, twin = (simulation(spec, nan_policy="raise") for _ in range(2))
    assert not sim.workers[0].is_plain_mean()
    with pytest.raises(NonFiniteError, match="step 0 is not finite"):
        sim.step(with_bad_entry(0, float("nan"), 1, "b"))
    means, expected = sim.step(gradients(1)), twin.step(gradients(1))
    assert all(torch.equal(means[n], expected[n]) for n in SHAPES)


def test_repeated_bad_steps_are_logged_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    sim = simulation("topk:ratio=0.1")
    for _ in range(9):
        sim.step(with_bad_entry(0, float("nan"), 1, "a"))
    sim.step(gradients(0))
    sim.step(with_bad_entry(0, float("nan"), 1, "a"))
    logged = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    once = "a gradient of step 0 is not finite on some rank; the step is skipped"
    per_worker = [once, *(f"{once} ({n} times in a row)" for n in (2, 4, 8))]
    per_worker += ["gradients are finite again after 9 steps", once.replace("step 0", "step 1")]
    assert sorted(logged) == sorted(per_worker * WORKERS)
    assert sim.stats()["skipped"] == 10


def test_every_bad_step_raises_with_the_policy_raise() -> None:
    sim = simulation("topk:ratio=0.1", nan_policy="raise")
    for _ in range(3):
        with pytest.raises(NonFiniteError):
            sim.step(with_bad_entry(0, float("nan"), 1, "a"))


def test_ignore_checks_nothing_and_needs_no_second_buffer() -> None:
    sim = simulation("topk:ratio=0.1", nan_policy="ignore")
    lane = sim.workers[0].lanes["a"]
    address = lane.memory_state["residual"].data_ptr()
    sim.step(with_bad_entry(0, float("nan"), 1, "a"))
    assert sim.stats()["skipped"] == 0
    assert lane.memory_state["residual"].data_ptr() == address


def test_policies_give_equal_means_while_all_is_finite() -> None:
    sims = [simulation("topk:ratio=0.1", nan_policy=p) for p in ("propagate", "raise", "ignore")]
    for step in range(3):
        means = [sim.step(gradients(step)) for sim in sims]
        assert all(torch.equal(m["a"], means[0]["a"]) for m in means)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nan_policy must be one of .* got 'hope'"):
        simulation("topk:ratio=0.1", nan_policy="hope")


@pytest.mark.parametrize("exchange", ["auto", "hierarchical:node=1", "hierarchical:node=3"])
def test_the_flag_needs_no_collective_of_its_own(exchange: str) -> None:
    for spec in ("topk:ratio=0.1", "powersgd", "randomk:ratio=0.1,values=fp32"):
        guarded = simulation(spec, exchange=exchange)
        unguarded = simulation(spec, exchange=exchange, nan_policy="ignore")
        guarded.step(gradients(0))
        unguarded.step(gradients(0))
        assert guarded.stats()["calls"] == unguarded.stats()["calls"]


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_the_flag_does_not_widen_the_dtype_of_sums(spec: str) -> None:
    """The flag adds two bytes to a ring of three ranks."""
    guarded, unguarded = simulation(spec), simulation(spec, nan_policy="ignore")
    guarded.step(gradients(0))
    unguarded.step(gradients(0))
    sent, least = guarded.stats()["sent_bytes"], unguarded.stats()["sent_bytes"]
    assert int(str(sent)) - int(str(least)) in (2, 3)


@dataclass(frozen=True)
class UncompressedLane:
    """A lane of which the guard checks the gradient."""

    grad: Tensor
    propagates_nonfinite: bool = False
    keeps_mean: bool = False

    def encoded_input(self) -> Tensor:
        return self.grad

    def replaced_state(self) -> list[Tensor]:
        return []


def is_flagged(grads: list[Tensor]) -> bool:
    guard = NonFiniteGuard(grads, [UncompressedLane(grad) for grad in grads])
    guard.begin()
    guard.requests({})
    return bool(guard.flag)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_any_entry_of_any_gradient_sets_the_flag(dtype: torch.dtype, bad: float) -> None:
    for place in range(7):
        grads = [torch.full((3,), 3e4, dtype=dtype), torch.full((2, 2), -3e4, dtype=dtype)]
        assert not is_flagged(grads)
        grads[place // 3 if place < 3 else 1].view(-1)[place % 3 if place < 3 else place - 3] = bad
        assert is_flagged(grads)
    assert not is_flagged([torch.zeros(0)])


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), float("-inf")])
def test_the_check_for_gpus_finds_the_same(bad: float) -> None:
    """Small tensors are concatenated, large ones checked in place, adjacent ones as one."""
    buffer = torch.full((12,), torch.finfo(torch.float32).max)
    apart = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(LARGE), torch.zeros(2, 2)]
    for tensors in ([buffer[:5], buffer[5:]], apart):
        for tensor in tensors:
            tensor.view(-1)[-1] += bad
            finite = bool(_range_on_device(tensors).isfinite())
            assert (not finite) == is_flagged(tensors) == (bad != 0)
            tensor.view(-1)[-1] = 0


def test_the_largest_numbers_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert not is_flagged([torch.tensor([largest, -largest])])


@pytest.mark.parametrize("policy", ["propagate", "ignore"])
@pytest.mark.parametrize(
    ("spec", "exchange"), [("signsgd", "auto"), ("none", "gather:aggregate=majority")]
)
def test_votes_have_the_loss_scale_with_and_without_a_guard(
    spec: str, exchange: str, policy: str
) -> None:
    sim = simulation(spec, exchange=exchange, nan_policy=policy)
    for worker in sim.workers:
        worker.loss_scale_changed(1024.0)
    grads = [{name: torch.ones(shape) for name, shape in SHAPES.items()} for _ in range(WORKERS)]
    means = sim.step(grads)
    assert {float(x) for mean in means.values() for x in mean.unique()} == {1024.0}


def test_a_majority_of_uncompressed_gradients_does_not_hide_a_bad_one() -> None:
    sim = simulation("none", exchange="gather:aggregate=majority")
    means = sim.step(with_bad_entry(0, float("nan"), 1, "a"))
    assert not means["a"].isfinite().all()
    assert sim.stats()["skipped"] == 1


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_verdict_takes_flags_of_the_host_in_either_form(as_tensor: bool) -> None:
    verdict = StepVerdict()
    for flags in ([(False, False), (True, False)], [(False, True)], [(False, False)]):
        for nonfinite, corrupted in flags:
            if as_tensor:
                verdict.add(torch.tensor([nonfinite]), torch.tensor([corrupted]))
            else:
                verdict.add(nonfinite, corrupted)
        verdict.close()
        assert not verdict.pending
        assert verdict.take() == tuple(any(column) for column in zip(*flags, strict=True))
        assert verdict.take() is None
