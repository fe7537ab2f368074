"""Properties of all local methods: participants, checks, state, evaluation."""

import io
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from local_jobs import ALL_METHODS, DENSE_MEANS, METHODS, twice_on_rank
from local_jobs import trained_rank as trained_on_rank
from local_workers import (
    SimulatedRun,
    adam,
    all_equal,
    momentum_sgd,
    plain_sgd,
    small_model,
    take_step,
    weights,
)
from torch import Tensor, nn

import gradwire
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.local import CSER, AsyncQsparseLocalSGD, BlockCSER, QsparseLocalSGD, simulated
from processes import Ranks

every_method = pytest.mark.parametrize("name", sorted(METHODS))


def simulated_run(name: str, **settings: Any) -> SimulatedRun:
    method, args, own = METHODS[name]
    return SimulatedRun(method, *args, **{**own, **settings})


def through_file(state: object) -> Any:
    """Returns the state as loaded from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_method
@pytest.mark.parametrize("at", [3, 4, 6])
def test_resumes_bitwise(name: str, at: int) -> None:
    with simulated_run(name, optimizer=momentum_sgd) as run:
        run.train(at)
        states = through_file([worker.state_dict() for worker in run.workers])
        models = through_file([model.state_dict() for model in run.models])
        optimizers = through_file([optimizer.state_dict() for optimizer in run.optimizers])
        run.train(9, first=at)
    again = simulated_run(name, optimizer=momentum_sgd)
    for rank, worker in enumerate(again.workers):
        again.models[rank].load_state_dict(models[rank])
        again.optimizers[rank].load_state_dict(optimizers[rank])
        worker.load_state_dict(states[rank])
    with again:
        again.train(9, first=at)
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), again.weights(), strict=True))
    assert again.workers[0].stats()["steps"] == at + 9


def assert_close(real: Tensor, simulated: Tensor) -> None:
    """An all-reduce may add in another order than rank by rank."""
    torch.testing.assert_close(real, simulated, rtol=2e-4, atol=1e-5)


def assert_close_but_for_roundings(real: Tensor, simulated: Tensor) -> None:
    """The last bit of a sum may round an anchor to the other of its neighbours in bfloat16."""
    differ = ~torch.isclose(real, simulated, rtol=2e-4, atol=1e-5)
    assert differ.float().mean() < 0.05
    assert (real - simulated).abs().max() <= 2**-7 * simulated.abs().max()


@every_method
def test_real_ranks_match_simulated_ones(four_ranks: Ranks, name: str) -> None:
    with simulated_run(name, size=4) as run:
        run.train(8)
        with ExitStack() as stack:
            for worker in run.workers:
                stack.enter_context(worker.averaged())
            mean = weights(run.models[0])
        stats = run.workers[0].stats()
    results = four_ranks.run(trained_on_rank, name, 8)
    for (real, real_mean, real_stats), ours in zip(results, run.weights(), strict=True):
        check = assert_close_but_for_roundings if name == "diloco-bf16" else assert_close
        check(real, ours)
        check(real_mean, mean)
        for key in ("steps", "syncs", "sent_bytes", "message_bytes", "dense_bytes", "ratio"):
            assert real_stats[key] == stats[key]
        assert real_stats["sent_bytes"] > 0


@every_method
def test_any_optimiser_works_inside(name: str) -> None:
    with simulated_run(name, optimizer=adam) as run:
        losses = run.train(60)
    assert losses[-1] < 0.7 * losses[0]


@every_method
def test_evaluation_on_the_mean_of_all_models(name: str) -> None:
    with simulated_run(name) as run:
        run.train(7)
        before = run.weights()
        sent = run.workers[0].stats()["sent_bytes"]
        assert not all_equal(before)
        with ExitStack() as stack:
            for worker in run.workers:
                stack.enter_context(worker.averaged())
            during = run.weights()
        assert all_equal(during)
        torch.testing.assert_close(during[0], torch.stack(before).mean(0))
        assert all(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True))
        stats = run.workers[0].stats()
        assert stats["sent_bytes"] == sent
        assert stats["auxiliary_bytes"] >= 2 * 2 * before[0].nbytes // 3


@every_method
def test_messages_are_as_long_as_planned(name: str) -> None:
    """The plan counts one worker's messages, not what a collective makes of them."""
    with simulated_run(name) as run:
        run.train(16)
        stats = run.workers[0].stats()
    dense = stats["steps"] * weights(run.models[0]).nbytes  # type: ignore[operator]
    # The non-finite flag adds one number to every collective.
    sent = stats["message_bytes"] - 4 * stats["calls"]  # type: ignore[operator]
    assert sent <= dense / stats["planned_ratio"] <= stats["message_bytes"]  # type: ignore[operator]


@every_method
def test_a_nonfinite_parameter_is_an_error_on_all_workers(name: str) -> None:
    with simulated_run(name) as run:
        run.train(3)
        next(run.models[1].parameters()).data[0, 0] = torch.nan
        if name in DENSE_MEANS:
            run.train(8, first=3)
            assert all(not w.isfinite().all() for w in run.weights())
        else:
            with pytest.raises(NonFiniteError):
                run.train(8, first=3)


@pytest.mark.parametrize("sync_every", [0, -1, 2.0, True])
def test_sync_every_is_a_positive_number(sync_every: object) -> None:
    with pytest.raises(ConfigError, match=r"QsparseLocalSGD: sync_every must be .*at least 1, got"):
        SimulatedRun(QsparseLocalSGD, "topk:ratio=0.1", sync_every=sync_every)


def with_different_model() -> SimulatedRun:
    run = simulated_run("qsparse")
    run.models[2][2].weight.data[0, 0] += 1
    return run


def test_models_that_differ_at_the_start_are_named() -> None:
    with pytest.raises(PeerError, match="differ at the start") as caught, with_different_model():
        pass
    assert "2.weight: rank [2]" in str(caught.value)
    assert "0.weight" not in str(caught.value)


def frozen_and_normalised() -> nn.Module:
    model = nn.Sequential(small_model(), nn.BatchNorm1d(32))
    model[0][0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", ["0.0.weight", "1.running_mean", "1.num_batches_tracked"])
def test_untrained_tensors_must_be_equal_too(name: str) -> None:
    run = simulated_run("qsparse", model=frozen_and_normalised)
    run.models[1].state_dict()[name].add_(1)
    with pytest.raises(PeerError, match="differ at the start") as caught, run:
        pass
    assert f"{name}: rank [1]" in str(caught.value)
    equal = simulated_run("qsparse", model=frozen_and_normalised, broadcast=True)
    equal.models[1].state_dict()[name].add_(1)
    with equal:
        states = [model.state_dict()[name] for model in equal.models]
        assert all_equal(states)


def test_buffers_that_differ_in_shape_are_named() -> None:
    run = simulated_run("qsparse", model=frozen_and_normalised)
    run.models[1].register_buffer("table", torch.zeros(3))
    with pytest.raises(ConfigError, match="set up differently") as caught, run:
        pass
    assert "table" in str(caught.value)


def test_parameters_not_trained_on_all_workers_are_named() -> None:
    models, group = [small_model() for _ in range(2)], simulated(2)
    models[1][0].bias.requires_grad_(False)
    workers = [
        QsparseLocalSGD(model, plain_sgd(model), sync_every=4, process_group=worker)
        for model, worker in zip(models, group, strict=True)
    ]
    differ = pytest.raises(ConfigError, match="ranks are set up differently")
    with differ as caught, workers[0], workers[1]:
        pass
    layout = "(48,) torch.float32"
    expected = f'0.bias: "{layout}" on rank [0]; "{layout}, not trained" on rank [1]'
    assert expected in str(caught.value)


def test_a_complex_buffer_is_compared_and_averaged() -> None:
    def with_complex_buffer() -> nn.Module:
        model = small_model()
        model.register_buffer("phases", torch.tensor([1 + 2j, 3j]))
        return model

    with simulated_run("qsparse", model=with_complex_buffer, size=2) as run:
        run.models[1].phases.mul_(3)
        with run.workers[0].averaged(), run.workers[1].averaged():
            assert torch.equal(run.models[0].phases, torch.tensor([2 + 4j, 6j]))
        assert torch.equal(run.models[0].phases, torch.tensor([1 + 2j, 3j]))


def test_models_are_broadcast_on_request() -> None:
    run = simulated_run("qsparse", broadcast=True)
    for rank, model in enumerate(run.models):
        model[0].bias.data += rank
    with run:
        assert all_equal(run.weights())
        assert torch.equal(run.weights()[0], weights(small_model()))
        run.train(4)
        assert all_equal(run.weights())


def test_settings_that_differ_are_named() -> None:
    models, group = [small_model() for _ in range(2)], simulated(2)
    workers = [
        QsparseLocalSGD(m, plain_sgd(m), f"topk:ratio={r}", sync_every=4, process_group=worker)
        for m, r, worker in zip(models, [0.1, 0.2], group, strict=True)
    ]
    differ = pytest.raises(ConfigError, match="ranks are set up differently")
    with differ as caught, workers[0], workers[1]:
        pass
    assert "compressor.ratio: 0.1 on rank [0]; 0.2 on rank [1]" in str(caught.value)


def test_a_parameter_added_midway() -> None:
    with simulated_run("qsparse", size=1) as run:
        run.train(1)
        run.models[0].extra = nn.Parameter(torch.zeros(3))
        run.optimizers[0].add_param_group({"params": [run.models[0].extra]})
        with pytest.raises(ConfigError, match=r"added or unfrozen: \['extra'\]"):
            run.train(1)


def test_a_parameter_frozen_midway() -> None:
    with simulated_run("qsparse", size=1) as run:
        run.train(1)
        run.models[0][0].bias.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"frozen or removed: \['0.bias'\]"):
            run.train(1)


def test_a_parameter_frozen_from_the_start_is_left_alone() -> None:
    def partly_frozen() -> nn.Sequential:
        model = small_model()
        model[0].weight.requires_grad_(False)
        return model

    with simulated_run("qsparse", model=partly_frozen) as run:
        run.train(4)
    assert all_equal(run.weights())
    assert torch.equal(run.models[0][0].weight, small_model()[0].weight)


def test_parameters_owned_by_an_integration(four_ranks: Ranks) -> None:
    for found in four_ranks.run(twice_on_rank):
        text = "0.weight: its gradient goes through a {} already; {}"
        assert found["attached first"] == text.format("Link", "detach that")
        assert found["entered first"] == text.format("QsparseLocalSGD", "end its context")
        assert found["reducer"] == text.format("QsparseLocalSGD", "end its context")


@pytest.mark.parametrize("name", sorted(ALL_METHODS))
def test_parameters_belong_to_one_method_at_a_time(name: str) -> None:
    method, args, settings = ALL_METHODS[name]
    with SimulatedRun(method, *args, **settings, size=1) as run:
        model, group = run.models[0], simulated(1)[0]
        second = method(model, plain_sgd(model), *args, **settings, process_group=group)
        message = rf"0\.weight: its gradient goes through a {method.__name__} already; end its"
        with pytest.raises(ConfigError, match=message), second:
            pass
        run.train(4)
    with second:
        for step in range(4):
            take_step(model, second.optimizers[0], step, 0)
    assert second.stats()["steps"] == 4


def test_an_error_inside_releases_the_parameters() -> None:
    run = simulated_run("qsparse", size=1)
    with pytest.raises(ZeroDivisionError), run.workers[0]:
        raise ZeroDivisionError
    with run.workers[0]:
        run.train(1)


def test_an_optimiser_of_another_model() -> None:
    with pytest.raises(ConfigError, match=r"4 .* not in the model: .* and 1 more"):
        QsparseLocalSGD(small_model(), plain_sgd(small_model()), sync_every=4)


@pytest.mark.parametrize("order", ["swapped", "no model", "no optimiser"])
def test_a_model_and_its_optimiser_in_this_order(order: str) -> None:
    model = small_model()
    sgd = plain_sgd(model)
    arguments: Any = {
        "swapped": (sgd, model),
        "no model": (None, sgd),
        "no optimiser": (model, None),
    }
    one, two = arguments[order]
    kinds = f"{type(one).__name__} and {type(two).__name__}"
    with pytest.raises(ConfigError, match=f"a model and its optimiser, in this order, got {kinds}"):
        QsparseLocalSGD(one, two, sync_every=4, process_group=simulated(1)[0])


def test_compressors_of_wrong_types() -> None:
    for method in (BlockCSER, CSER):
        with pytest.raises(ConfigError, match="expected a spec string or a compressor, got 3"):
            SimulatedRun(method, None, 3, sync_every=4)
    for method in (AsyncQsparseLocalSGD, QsparseLocalSGD):
        with pytest.raises(ConfigError, match="expected a spec string or a compressor, got 3"):
            SimulatedRun(method, 3, sync_every=4)


def test_a_group_of_a_wrong_type(four_ranks: Ranks) -> None:
    message = "process_group: expected a ProcessGroup, got 'world'"
    assert four_ranks.run(_with_invalid_group)[0] == message


def _with_invalid_group() -> str:
    model: Any = small_model()
    try:
        QsparseLocalSGD(model, plain_sgd(model), sync_every=4, process_group="world")  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "state: expected what state_dict returns, got NoneType"),
        ([1], "state: expected what state_dict returns, got list"),
        ({"rank0": None}, r"state: has \['rank0'\], but not rank0; every rank saves its own"),
    ],
)
def test_an_invalid_state(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        simulated_run("qsparse", size=1).workers[0].load_state_dict(state)


def test_without_a_process_group() -> None:
    model = small_model()
    with pytest.raises(ConfigError, match="there is no process group"):
        QsparseLocalSGD(model, plain_sgd(model), sync_every=4)


def test_simulated_workers_out_of_step() -> None:
    with simulated_run("qsparse", sync_every=1) as run:
        run.optimizers[0].step()
        message = r"simulated worker 0 continues, but workers \[1, 2\] have not reached this sync"
        with pytest.raises(PeerError, match=message):
            run.optimizers[0].step()


def test_simulated_workers_are_averaged_together() -> None:
    """One after the other, the first would leave `averaged` before the mean is there."""
    with simulated_run("qsparse") as run:
        run.train(2)
        before = run.weights()
        message = r"simulated worker 0 continues, but workers \[1, 2\] have not reached this sync"
        with pytest.raises(PeerError, match=message), run.workers[0].averaged():
            pass
        assert torch.equal(run.weights()[0], before[0])


@pytest.mark.parametrize("name", sorted(METHODS.keys() - DENSE_MEANS))
def test_policies_for_gradients_are_refused(name: str) -> None:
    message = r"nan_policy must be one of \['raise', 'ignore'\], got 'propagate'"
    with pytest.raises(ConfigError, match=f"{METHODS[name][0].__name__}: {message}"):
        simulated_run(name, nan_policy="propagate")


@pytest.mark.parametrize("seed", [None, 1.5, -1])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ConfigError, match=r"QsparseLocalSGD: seed must be .*at least 0, got"):
        simulated_run("qsparse", seed=seed)


def test_a_state_of_other_settings() -> None:
    with simulated_run("qsparse", size=2) as run:
        run.train(2)
    state = run.workers[0].state_dict()
    with pytest.raises(ConfigError, match="state: sync_every is 4, expected 8"):
        simulated_run("qsparse", size=2, sync_every=8).workers[0].load_state_dict(state)
    with pytest.raises(ConfigError, match=r"state: has \['rank0'\], but not rank1"):
        simulated_run("qsparse", size=2).workers[1].load_state_dict(state)


def test_a_state_is_loaded_before_the_context() -> None:
    with simulated_run("qsparse") as run:
        with pytest.raises(ConfigError, match="before the context is entered"):
            run.workers[0].load_state_dict(run.workers[0].state_dict())
        with pytest.raises(ConfigError, match="is entered already"):
            run.workers[0].__enter__()


def test_steps_after_the_context_are_not_counted() -> None:
    run = simulated_run("qsparse")
    with run:
        run.train(4)
    run.train(4, first=4)
    assert run.workers[0].stats()["steps"] == 4
    assert not all_equal(run.weights())


def test_public_names() -> None:
    assert gradwire.local.QsparseLocalSGD is QsparseLocalSGD
