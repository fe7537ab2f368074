"""The study of Byzantine workers: attacks, aggregations, and numbers of liars."""

from gradwire.bench.records.schema import BASELINE
from gradwire.bench.studies.study import Study

ATTACKS = (
    "sign_flip:scale=10",
    "noise:scale=10",
    "alie:z=1.5",
    "inner_product:eps=0.1",
    "inner_product:eps=2",
    "nan",
)
"""The inner product has two sizes: a small one is no outlier, and a large one reverses the mean."""

AGGREGATIONS = (
    "mean",
    "median",
    "trimmed",
    "diameter",
    "multi_krum",
    "geometric_median",
    "clipped",
    "trimmed,mix=true",
)

FEW_ATTACKS = ATTACKS[:1] + ATTACKS[2:]
FEW_AGGREGATIONS = ("mean", "trimmed", "diameter", "multi_krum")
"""Those that the other studies than `byzantine` compare; noise is the easiest attack."""

MOMENTUM = "side=update"
"""Workers exchange their own momentum, whose variance is a tenth of that of gradients."""


def byzantine(method: str, aggregation: str, liars: int, attack: str | None, *options: str) -> str:
    """Returns the case of one aggregation, all of whose assumed liars attack."""
    robust = aggregation != "mean"
    name, *settings = aggregation.split(",")
    announced = [f"faulty={liars}"] if robust else []
    exchange = ",".join([f"gather:aggregate={name}", *announced, *settings])
    attacked = [] if attack is None else [f"attack=({attack})", f"liars={liars}"]
    return f"{method} @ {', '.join([f'exchange=({exchange})', *options, *attacked])}"


def _grid(
    method: str,
    liars: int,
    *options: str,
    attacks: tuple[str, ...] = FEW_ATTACKS,
    aggregations: tuple[str, ...] = FEW_AGGREGATIONS,
) -> tuple[str, ...]:
    """Returns all attacks on all aggregations, each of which is also trained without liars."""
    return tuple(
        byzantine(method, aggregation, liars, attack, *options)
        for attack in (None, *attacks)
        for aggregation in aggregations
    )


def _study(summary: str, cases: tuple[str, ...], liars: int = 2) -> Study:
    return Study(
        summary,
        "resnet9:bf16=true",
        5 * 78,
        cases,
        seeds=(0, 1, 2),
        workers=10,
        evaluations=5,
        rates=("1gbit",),
        by_case=True,
        # The fewest that Krum accepts.
        smoke_workers=2 * liars + 3,
        # No divisor of the grid's width, so that all aggregations are among them.
        smoke_every=7,
    )


BYZANTINE = {
    "byzantine": _study(
        "attacks of 2 of 10 workers on robust aggregations of their momenta",
        (
            BASELINE,
            f"none @ {MOMENTUM}",
            *_grid("none", 2, MOMENTUM, attacks=ATTACKS, aggregations=AGGREGATIONS),
        ),
    ),
    "byzantine-3": _study(
        "attacks of 3 of 10 workers on robust aggregations of their momenta",
        (BASELINE, f"none @ {MOMENTUM}", *_grid("none", 3, MOMENTUM)),
        liars=3,
    ),
    "byzantine-gradients": _study(
        "attacks of 2 of 10 workers on robust aggregations of their gradients",
        (BASELINE, *_grid("none", 2)),
    ),
    "byzantine-qsgd": _study(
        "attacks of 2 of 10 workers on robust aggregations of momenta in 4 bits",
        (BASELINE, f"qsgd:bits=4 @ {MOMENTUM}", *_grid("qsgd:bits=4", 2, MOMENTUM)),
    ),
}
"""Five epochs of CIFAR-10 each; 78 steps of 10 workers are one."""
