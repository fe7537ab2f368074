"""Keras on several processes: `model.fit` as before, with one line for the optimiser.

torchrun --nproc-per-node 2 examples/keras_fit.py
"""

import argparse

import keras
import numpy as np
import torch.distributed as dist

import gradwire


def digits(count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns noisy copies of ten fixed patterns, and the labels."""
    patterns = np.random.default_rng(0).normal(size=(10, 784))
    labels = generator.integers(10, size=count)
    noise = 3 * generator.normal(size=(count, 784))
    return (patterns[labels] + noise).astype("float32"), labels


def train(spec: str, epochs: int, examples: int, hidden: int) -> tuple[float, dict[str, object]]:
    """Returns the accuracy on unseen examples, and statistics of the communication."""
    # Nothing broadcasts weights, so all ranks must begin with the same ones.
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    optimizer = gradwire.keras.DistributedOptimizer(keras.optimizers.SGD(0.05), spec)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    # Each rank has different examples, and as many as the others.
    x, y = digits(examples, np.random.default_rng([1, dist.get_rank()]))
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    _, accuracy = model.evaluate(*digits(1000, np.random.default_rng(2)), verbose=0)
    return accuracy, optimizer.gradwire.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", default="powersgd:rank=4")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    accuracy, stats = train(args.spec, args.epochs, args.examples, args.hidden)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than dense steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
