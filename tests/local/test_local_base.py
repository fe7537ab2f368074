"""What all methods that talk rarely have in common: who takes part, checks, state, evaluation."""

import io
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from local_jobs import METHODS, twice_on_rank
from local_jobs import trained_rank as trained_on_rank
from local_workers import Crew, adam, all_equal, momentum_sgd, plain_sgd, small_model, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.local import CSER, AsyncQsparseLocalSGD, BlockCSER, QsparseLocalSGD, simulated
from processes import Ranks

every_method = pytest.mark.parametrize("name", sorted(METHODS))


def crew_of(name: str, **settings: Any) -> Crew:
    method, args, own = METHODS[name]
    return Crew(method, *args, **{**own, **settings})


def saved(state: object) -> Any:
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_method
@pytest.mark.parametrize("at", [3, 4, 6])
def test_resumes_bitwise(name: str, at: int) -> None:
    with crew_of(name, optimizer=momentum_sgd) as crew:
        crew.train(at)
        states = saved([worker.state_dict() for worker in crew.workers])
        models = saved([model.state_dict() for model in crew.models])
        optimizers = saved([optimizer.state_dict() for optimizer in crew.optimizers])
        crew.train(9, first=at)
    again = crew_of(name, optimizer=momentum_sgd)
    for rank, worker in enumerate(again.workers):
        again.models[rank].load_state_dict(models[rank])
        again.optimizers[rank].load_state_dict(optimizers[rank])
        worker.load_state_dict(states[rank])
    with again:
        again.train(9, first=at)
    assert all(torch.equal(a, b) for a, b in zip(crew.weights(), again.weights(), strict=True))
    assert again.workers[0].stats()["steps"] == at + 9


@every_method
def test_real_ranks_do_what_simulated_ones_do(four_ranks: Ranks, name: str) -> None:
    with crew_of(name, size=4) as crew:
        crew.train(8)
        with ExitStack() as stack:
            for worker in crew.workers:
                stack.enter_context(worker.averaged())
            mean = weights(crew.models[0])
        stats = crew.workers[0].stats()
    results = four_ranks.run(trained_on_rank, name, 8)
    for (real, real_mean, real_stats), ours in zip(results, crew.weights(), strict=True):
        # An all-reduce may add in another order than rank by rank.
        torch.testing.assert_close(real, ours, rtol=2e-4, atol=1e-5)
        torch.testing.assert_close(real_mean, mean, rtol=2e-4, atol=1e-5)
        for key in ("steps", "syncs", "sent_bytes", "message_bytes", "dense_bytes", "ratio"):
            assert real_stats[key] == stats[key]
        assert real_stats["sent_bytes"] > 0


@every_method
def test_any_optimiser_goes_inside(name: str) -> None:
    with crew_of(name, optimizer=adam) as crew:
        losses = crew.train(60)
    assert losses[-1] < 0.7 * losses[0]


@every_method
def test_evaluation_on_the_mean_of_all_models(name: str) -> None:
    with crew_of(name) as crew:
        crew.train(7)
        before = crew.weights()
        sent = crew.workers[0].stats()["sent_bytes"]
        assert not all_equal(before)
        with ExitStack() as stack:
            for worker in crew.workers:
                stack.enter_context(worker.averaged())
            during = crew.weights()
        assert all_equal(during)
        torch.testing.assert_close(during[0], torch.stack(before).mean(0))
        assert all(torch.equal(a, b) for a, b in zip(before, crew.weights(), strict=True))
        stats = crew.workers[0].stats()
        assert stats["sent_bytes"] == sent
        assert stats["aside_bytes"] >= 2 * 2 * before[0].nbytes // 3


@every_method
def test_messages_are_as_long_as_planned(name: str) -> None:
    """The plan is about one worker's messages; what a collective makes of them is its own."""
    with crew_of(name) as crew:
        crew.train(16)
        stats = crew.workers[0].stats()
    dense = stats["steps"] * weights(crew.models[0]).nbytes  # type: ignore[operator]
    # On top comes the alarm, one number at every talk.
    said = stats["message_bytes"] - 4 * stats["calls"]  # type: ignore[operator]
    assert said <= dense / stats["planned_ratio"] <= stats["message_bytes"]  # type: ignore[operator]


@every_method
def test_a_number_that_is_none_is_an_error_on_all_workers(name: str) -> None:
    with crew_of(name) as crew:
        crew.train(3)
        next(crew.models[1].parameters()).data[0, 0] = torch.nan
        if name in ("local", "local-late", "cser-blocks"):
            # All is said as it is, so that all have it.
            crew.train(8, first=3)
            assert all(not w.isfinite().all() for w in crew.weights())
        else:
            with pytest.raises(NonFiniteError):
                crew.train(8, first=3)


@pytest.mark.parametrize("sync_every", [0, -1, 2.0, True])
def test_sync_every_is_a_positive_number(sync_every: object) -> None:
    with pytest.raises(ConfigError, match=r"QsparseLocalSGD: sync_every must be .*at least 1, got"):
        Crew(QsparseLocalSGD, "topk:ratio=0.1", sync_every=sync_every)


def other_models() -> Crew:
    crew = crew_of("qsparse")
    crew.models[2][2].weight.data[0, 0] += 1
    return crew


def test_models_that_differ_at_the_start_are_named() -> None:
    with pytest.raises(PeerError, match="differ at the start") as caught, other_models():
        pass
    assert "2.weight: rank [2]" in str(caught.value)
    assert "0.weight" not in str(caught.value)


def frozen_and_normalised() -> nn.Module:
    model = nn.Sequential(small_model(), nn.BatchNorm1d(32))
    model[0][0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", ["0.0.weight", "1.running_mean", "1.num_batches_tracked"])
def test_what_is_not_trained_must_be_equal_too(name: str) -> None:
    crew = crew_of("qsparse", model=frozen_and_normalised)
    crew.models[1].state_dict()[name].add_(1)
    with pytest.raises(PeerError, match="differ at the start") as caught, crew:
        pass
    assert f"{name}: rank [1]" in str(caught.value)
    made_equal = crew_of("qsparse", model=frozen_and_normalised, broadcast=True)
    made_equal.models[1].state_dict()[name].add_(1)
    with made_equal:
        states = [model.state_dict()[name] for model in made_equal.models]
        assert all_equal(states)


def test_buffers_of_other_forms_are_named() -> None:
    crew = crew_of("qsparse", model=frozen_and_normalised)
    crew.models[1].register_buffer("table", torch.zeros(3))
    with pytest.raises(ConfigError, match="set up differently") as caught, crew:
        pass
    assert "table" in str(caught.value)


def test_who_trains_what_others_do_not_is_named() -> None:
    models, seats = [small_model() for _ in range(2)], simulated(2)
    models[1][0].bias.requires_grad_(False)
    workers = [
        QsparseLocalSGD(model, plain_sgd(model), sync_every=4, process_group=seat)
        for model, seat in zip(models, seats, strict=True)
    ]
    differ = pytest.raises(ConfigError, match="ranks are set up differently")
    with differ as caught, workers[0], workers[1]:
        pass
    form = "(48,) torch.float32"
    assert f'0.bias: "{form}" on rank [0]; "{form}, not trained" on rank [1]' in str(caught.value)


def test_a_complex_buffer_is_compared_and_averaged() -> None:
    def turning() -> nn.Module:
        model = small_model()
        model.register_buffer("turns", torch.tensor([1 + 2j, 3j]))
        return model

    with crew_of("qsparse", model=turning, size=2) as crew:
        crew.models[1].contexts.mul_(3)
        with crew.workers[0].averaged(), crew.workers[1].averaged():
            assert torch.equal(crew.models[0].contexts, torch.tensor([2 + 4j, 6j]))
        assert torch.equal(crew.models[0].contexts, torch.tensor([1 + 2j, 3j]))


def test_models_are_made_equal_on_request() -> None:
    crew = crew_of("qsparse", broadcast=True)
    for rank, model in enumerate(crew.models):
        model[0].bias.data += rank
    with crew:
        assert all_equal(crew.weights())
        assert torch.equal(crew.weights()[0], weights(small_model()))
        crew.train(4)
        assert all_equal(crew.weights())


def test_settings_that_differ_are_named() -> None:
    model, seats = [small_model() for _ in range(2)], simulated(2)
    workers = [
        QsparseLocalSGD(m, plain_sgd(m), f"topk:ratio={r}", sync_every=4, process_group=seat)
        for m, r, seat in zip(model, [0.1, 0.2], seats, strict=True)
    ]
    differ = pytest.raises(ConfigError, match="ranks are set up differently")
    with differ as caught, workers[0], workers[1]:
        pass
    assert 'spec: "topk:ratio=0.1" on rank [0]; "topk:ratio=0.2" on rank [1]' in str(caught.value)


def test_a_parameter_added_midway() -> None:
    with crew_of("qsparse", size=1) as crew:
        crew.train(1)
        crew.models[0].extra = nn.Parameter(torch.zeros(3))
        crew.optimizers[0].add_param_group({"params": [crew.models[0].extra]})
        with pytest.raises(ConfigError, match=r"added or unfrozen: \['extra'\]"):
            crew.train(1)


def test_a_parameter_frozen_midway() -> None:
    with crew_of("qsparse", size=1) as crew:
        crew.train(1)
        crew.models[0][0].bias.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"frozen or removed: \['0.bias'\]"):
            crew.train(1)


def test_a_parameter_frozen_from_the_start_is_left_alone() -> None:
    def partly_frozen() -> nn.Sequential:
        model = small_model()
        model[0].weight.requires_grad_(False)
        return model

    with crew_of("qsparse", model=partly_frozen) as crew:
        crew.train(4)
    assert all_equal(crew.weights())
    assert torch.equal(crew.models[0][0].weight, small_model()[0].weight)


def test_a_model_that_talks_already(four_ranks: Ranks) -> None:
    assert "give its .module" in four_ranks.run(_wrapped_in_ddp)[0]


def _wrapped_in_ddp() -> str:
    model = DDP(small_model())
    try:
        QsparseLocalSGD(model, plain_sgd(model), sync_every=4)
    except ConfigError as error:
        return str(error)
    return ""


def test_parameters_that_go_through_a_mount_already(four_ranks: Ranks) -> None:
    for found in four_ranks.run(twice_on_rank):
        said = "0.weight: its gradient goes through a {} already; {}"
        assert found["attached first"] == said.format("Link", "detach that")
        assert found["entered first"] == said.format("QsparseLocalSGD", "end its context")
        assert found["reducer"] == said.format("QsparseLocalSGD", "end its context")


@pytest.mark.parametrize("name", [*sorted(METHODS), "async"])
def test_parameters_are_one_method_s_at_a_time(name: str) -> None:
    waiting_for_nobody = AsyncQsparseLocalSGD, ("topk:ratio=0.1",), {"sync_every": 4}
    method, args, settings = {**METHODS, "async": waiting_for_nobody}[name]
    with Crew(method, *args, **settings, size=1) as crew:
        own = crew.models[0], crew.optimizers[0]
        second = method(*own, *args, **settings, process_group=simulated(1)[0])
        message = rf"0\.weight: its gradient goes through a {method.__name__} already; end its"
        with pytest.raises(ConfigError, match=message), second:
            pass
        crew.train(4)
    with second:
        crew.train(4)
    assert second.stats()["steps"] == 4


def test_an_error_inside_lets_go_of_the_parameters() -> None:
    crew = crew_of("qsparse", size=1)
    with pytest.raises(ZeroDivisionError), crew.workers[0]:
        raise ZeroDivisionError
    with crew.workers[0]:
        crew.train(1)


def test_an_optimiser_of_another_model() -> None:
    with pytest.raises(ConfigError, match="4 parameters that no model has"):
        QsparseLocalSGD(small_model(), plain_sgd(small_model()), sync_every=4)


@pytest.mark.parametrize("order", ["swapped", "no model", "no optimiser"])
def test_a_model_and_its_optimiser_in_this_order(order: str) -> None:
    model = small_model()
    sgd = plain_sgd(model)
    given: Any = {"swapped": (sgd, model), "no model": (None, sgd), "no optimiser": (model, None)}
    one, two = given[order]
    kinds = f"{type(one).__name__} and {type(two).__name__}"
    with pytest.raises(ConfigError, match=f"a model and its optimiser, in this order, got {kinds}"):
        QsparseLocalSGD(one, two, sync_every=4, process_group=simulated(1)[0])


def test_compressors_of_wrong_types() -> None:
    for method in (BlockCSER, CSER):
        with pytest.raises(ConfigError, match="expected a spec string or a compressor, got 3"):
            Crew(method, None, 3, sync_every=4)
    for method in (AsyncQsparseLocalSGD, QsparseLocalSGD):
        with pytest.raises(ConfigError, match="expected a spec string or a compressor, got 3"):
            Crew(method, 3, sync_every=4)


def test_a_group_of_a_wrong_type(four_ranks: Ranks) -> None:
    said = "process_group: expected a ProcessGroup, got 'world'"
    assert four_ranks.run(_in_no_group)[0] == said


def _in_no_group() -> str:
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
def test_what_is_no_state(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        crew_of("qsparse", size=1).workers[0].load_state_dict(state)


def test_without_a_process_group() -> None:
    model = small_model()
    with pytest.raises(ConfigError, match="there is no process group"):
        QsparseLocalSGD(model, plain_sgd(model), sync_every=4)


def test_simulated_workers_out_of_step() -> None:
    with crew_of("qsparse", sync_every=1) as crew:
        crew.optimizers[0].step()
        message = r"simulated worker 0 goes on, but workers \[1, 2\] have yet to come"
        with pytest.raises(PeerError, match=message):
            crew.optimizers[0].step()


def test_simulated_workers_are_averaged_together() -> None:
    """One after the other, the first would get the mean when it no longer asks for it."""
    with crew_of("qsparse") as crew:
        crew.train(2)
        before = crew.weights()
        message = r"simulated worker 0 goes on, but workers \[1, 2\] have yet to come"
        with pytest.raises(PeerError, match=message), crew.workers[0].averaged():
            pass
        assert torch.equal(crew.weights()[0], before[0])


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local", "local-late", "cser-blocks"}))
def test_a_policy_for_gradients_is_none_for_parameters(name: str) -> None:
    message = r"nan_policy must be one of \['raise', 'ignore'\], got 'propagate'"
    with pytest.raises(ConfigError, match=f"{METHODS[name][0].__name__}: {message}"):
        crew_of(name, nan_policy="propagate")


@pytest.mark.parametrize("seed", [None, 1.5, -1])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ConfigError, match=r"QsparseLocalSGD: seed must be .*at least 0, got"):
        crew_of("qsparse", seed=seed)


def test_a_state_of_another_set_up() -> None:
    with crew_of("qsparse", size=2) as crew:
        crew.train(2)
    state = crew.workers[0].state_dict()
    with pytest.raises(ConfigError, match="state: sync_every is 4, expected 8"):
        crew_of("qsparse", size=2, sync_every=8).workers[0].load_state_dict(state)
    with pytest.raises(ConfigError, match=r"state: has \['rank0'\], but not rank1"):
        crew_of("qsparse", size=2).workers[1].load_state_dict(state)


def test_a_state_comes_before_the_first_step() -> None:
    with crew_of("qsparse") as crew:
        with pytest.raises(ConfigError, match="before the context is entered"):
            crew.workers[0].load_state_dict(crew.workers[0].state_dict())
        with pytest.raises(ConfigError, match="is entered already"):
            crew.workers[0].__enter__()


def test_steps_after_the_context_are_not_followed() -> None:
    crew = crew_of("qsparse")
    with crew:
        crew.train(4)
    crew.train(4, first=4)
    assert crew.workers[0].stats()["steps"] == 4
    assert not all_equal(crew.weights())


def test_public_names() -> None:
    assert gradwire.local.QsparseLocalSGD is QsparseLocalSGD
