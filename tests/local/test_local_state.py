"""States of local methods: what is refused, by name, and that a refused one changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_jobs import METHODS
from local_workers import SimulatedRun, plain_sgd, small_model

from gradwire.compressors.topk import TopK
from gradwire.errors import ConfigError
from gradwire.local import DiLoCo, QsparseLocalSGD, simulated
from gradwire.local.base import LocalMethod


class Mine(QsparseLocalSGD):
    """A method of a user's own."""


def simulated_run(name: str, **settings: Any) -> SimulatedRun:
    method, args, own = METHODS[name]
    return SimulatedRun(method, *args, **{**own, **settings})


def saved(name: str, steps: int = 3) -> Any:
    """Returns the state of worker 0 after some steps."""
    with simulated_run(name) as run:
        run.train(steps)
        return run.workers[0].state_dict()


def refusal(worker: LocalMethod, state: Any) -> str:
    """Returns why a worker refuses a state; it stays as it was."""
    before = str(worker.state_dict())
    with pytest.raises(ConfigError, match=r"^state") as caught:
        worker.load_state_dict(state)
    assert str(worker.state_dict()) == before
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nonfinite_tensors_are_refused_by_name(name: str) -> None:
    whole = saved(name)
    for kind, tensors in whole["rank0"]["tensors"].items():
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                kept = tensor.clone()
                tensor.view(-1)[0] = float("nan")
                message = refusal(simulated_run(name).workers[0], whole)
                assert message.startswith(f"state: {kind} of {key!r} has entries that are not fin")
                tensor.copy_(kept)
    simulated_run(name).workers[0].load_state_dict(whole)


def test_a_nonfinite_residual_of_a_later_engine_changes_nothing() -> None:
    """Engines are loaded one after the other."""
    with SimulatedRun(DiLoCo, "topk:ratio=0.1", sync_every=4, fragments=2) as run:
        run.train(4)
        whole: Any = run.workers[0].state_dict()
    lanes = [lane for lane in whole["rank0"]["engines"][1]["lanes"].values() if lane["memory"]]
    lanes[0]["memory"]["residual"][0] = float("inf")
    fresh = SimulatedRun(DiLoCo, "topk:ratio=0.1", sync_every=4, fragments=2)
    message = refusal(fresh.workers[0], whole)
    assert "residual of rank 0 has 1 entry that is not finite" in message


BROKEN: dict[str, Callable[[Any], object]] = {
    "no identity": lambda own: own.pop("identity"),
    "no engines": lambda own: own.pop("engines"),
    "too few engines": lambda own: own["engines"].pop(),
    "no tensors": lambda own: own.pop("tensors"),
    "tensors are a list": lambda own: own.update(tensors=[]),
    "a kind is missing": lambda own: own["tensors"].pop("anchor"),
    "a tensor is missing": lambda own: own["tensors"]["anchor"].pop("0.weight"),
    "a tensor is a number": lambda own: own["tensors"]["anchor"].update({"0.weight": 3}),
    "a tensor would be broadcast": lambda own: own["tensors"]["anchor"].update(
        {"0.weight": torch.zeros(1)}
    ),
    "another dtype": lambda own: own["tensors"]["anchor"].update(
        {"0.weight": own["tensors"]["anchor"]["0.weight"].double()}
    ),
    "an unknown tensor": lambda own: own["tensors"]["anchor"].update(x=torch.zeros(1)),
    "no steps": lambda own: own.pop("steps"),
    "negative syncs": lambda own: own.update(syncs=-1),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_broken_state_is_refused(defect: str) -> None:
    whole = saved("qsparse")
    BROKEN[defect](whole["rank0"])
    refusal(simulated_run("qsparse").workers[0], whole)


def test_a_state_of_another_method_names_the_first_difference() -> None:
    whole = saved("qsparse")
    model = small_model()
    for method, message in (
        (QsparseLocalSGD, 'state: compressor.class is "Pipeline", expected "TopK"'),
        (Mine, 'state: method is "QsparseLocalSGD", expected "test_local_state.Mine"'),
    ):
        worker = method(
            model, plain_sgd(model), TopK(0.1), sync_every=4, process_group=simulated(3)[0]
        )
        assert message in refusal(worker, whole)


@pytest.mark.parametrize("key", ["nan_policy", "broadcast", "method"])
def test_workers_that_would_exchange_different_messages_are_refused(key: str) -> None:
    """They would wait for each other, or read a message that was sent for another purpose."""
    usual: dict[str, Any] = {"nan_policy": "raise", "broadcast": False}
    other: dict[str, Any] = {"nan_policy": "ignore", "broadcast": True}
    models, group = [small_model() for _ in range(2)], simulated(2)
    workers = [
        (Mine if odd and key == "method" else QsparseLocalSGD)(
            model,
            plain_sgd(model),
            sync_every=4,
            process_group=worker,
            **({key: other[key]} if odd and key in other else {}),
        )
        for model, worker, odd in zip(models, group, [False, True], strict=True)
    ]
    differ = pytest.raises(ConfigError, match="ranks are set up differently")
    with differ as caught, workers[0], workers[1]:
        pass
    first = "QsparseLocalSGD" if key == "method" else usual[key]
    shown = f'"{first}"' if isinstance(first, str) else str(first).lower()
    assert f"{key}: {shown} on rank [0]" in str(caught.value).replace("[0]: ", ": ", 1)
