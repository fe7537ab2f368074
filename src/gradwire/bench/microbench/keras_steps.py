"""Steps of a Keras model on the ranks of a launcher: through the integration, and averaged by hand.

    gradwire net --workers 4 --rate 100mbit -- python -m gradwire.bench.microbench.keras_steps
    gradwire net --workers 2 -- python -m gradwire.bench.microbench.keras_steps none --by-hand

Prints a line of JSON per spec: milliseconds of a step, and the ratio to `none` or, with --by-hand,
to the same step whose gradients go through one all-reduce by hand, which is the overhead of the
integration itself. All alternate, so that a slowdown of the machine affects all of them.
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from gradwire.bench.machine import machine_facts
from gradwire.integrations.keras.tensorflow import TensorFlow
from gradwire.keras import DistributedGradientTape, Reducer

Step: TypeAlias = Callable[[], object]

BY_HAND = "by-hand"
BATCH = 32
WARMUP = 3


class Case(NamedTuple):
    """A compiled training step, and its reducer, which counts the bytes."""

    step: Step
    reducer: Reducer | None


def mlp(hidden: int) -> keras.Model:
    """Builds an MLP, 784-hidden-hidden-10: 5.8 million parameters for hidden=2048."""
    keras.utils.set_random_seed(0)
    wide = [keras.layers.Dense(hidden, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *wide, keras.layers.Dense(10)])


def by_hand(gradients: list[Any], _: object = None) -> list[Any]:
    """Averages as a loop without Gradwire does: all gradients in one buffer, one all-reduce."""

    def work(tensors: list[torch.Tensor], _: float) -> list[torch.Tensor]:
        flat = torch.cat([gradient.reshape(-1) for gradient in tensors])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([gradient.numel() for gradient in tensors])
        return [piece.view(g.shape) for piece, g in zip(pieces, tensors, strict=True)]

    return TensorFlow().apply_work(work, gradients, 1.0)


def case(spec: str, hidden: int) -> Case:
    """Builds a step with a new model for a spec, on this rank's own data."""
    model, optimizer = mlp(hidden), keras.optimizers.SGD(0.01)
    variables = model.trainable_variables
    reducer = None if spec == BY_HAND else Reducer(variables, spec)
    rng = np.random.default_rng(dist.get_rank())
    x = tf.constant(rng.normal(size=(BATCH, 784)).astype("float32"))
    y = tf.constant(rng.integers(10, size=BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        if reducer is None:
            gradients = by_hand(tape.gradient(loss, variables))
        else:
            gradients = DistributedGradientTape(tape, reducer).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return Case(tf.function(step), reducer)


def compare(specs: list[str], hidden: int, steps: int) -> list[dict[str, object]]:
    """Returns a row per spec, compared with the first; call it on all ranks."""
    cases = {spec: case(spec, hidden) for spec in specs}
    seconds: dict[str, list[float]] = {spec: [] for spec in specs}
    sent_before: dict[str, int] = {}
    for i in range(WARMUP + steps):
        for spec, (step, reducer) in cases.items():
            if i == WARMUP:
                sent_before[spec] = _sent(reducer)
            dist.barrier()
            start = perf_counter()
            step()
            seconds[spec].append(perf_counter() - start)
    rows: list[dict[str, object]] = []
    first_ms = 1e3 * median(seconds[specs[0]][WARMUP:])
    for spec, (_, reducer) in cases.items():
        step_ms = 1e3 * median(seconds[spec][WARMUP:])
        sent = (_sent(reducer) - sent_before[spec]) / steps if reducer is not None else None
        row = {"spec": spec, "step_ms": step_ms, "ratio": step_ms / first_ms, "sent_bytes": sent}
        rows.append({**row, "against": specs[0]})
        if reducer is not None:
            reducer.detach()
    return rows


def _sent(reducer: Reducer | None) -> int:
    sent = 0 if reducer is None else reducer.stats()["sent_bytes"]
    assert isinstance(sent, int)
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", default=["none", "topk:ratio=0.01"])
    parser.add_argument("--by-hand", action="store_true", help="also measure a mean by hand")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rate", help="the rate given to the launcher, for the record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    dist.init_process_group("gloo")
    rows = compare([BY_HAND] * args.by_hand + args.specs, args.hidden, args.steps)
    facts = {"workers": dist.get_world_size(), "rate": args.rate, "steps": args.steps}
    facts |= {"hidden": args.hidden, "batch": BATCH, "tensorflow": tf.__version__}
    if dist.get_rank() == 0:
        for row in rows:
            line = {"kind": "keras", "version": 1, **row, **facts, "machine": machine_facts()}
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
