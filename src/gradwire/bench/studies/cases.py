"""The cases that the studies compare, as `gradwire bench train` takes them."""

from gradwire.bench.records.schema import BASELINE

DENSE = (BASELINE, "torch-bf16")
"""The baselines of every study: a mean in 32 and in 16 bits."""

RAW = "gain_ref=raw"
"""Gains as in GraVAC's code, for which its thresholds are meant."""

EF = "gain_ref=ef"
"""Gains against gradient plus residual, as printed in the paper."""

SWEEP = (
    *DENSE,
    "torch-fp16",
    "topk:ratio=0.1",
    "topk:ratio=0.01",
    "topk:ratio=0.001",
    "topk:ratio=0.01 @ controller=autopilot",
    f"topk:ratio=0.1 @ controller=(gravac:low=10,high=1000,window=100,epsilon=0.25,{RAW})",
    "topk:ratio=0.1 @ controller=(accordion:low=0.1,high=0.001,interval=1)",
)
"""The settings that controllers choose from, and three controllers."""


def qsparse(ratio: float, sync_every: int, code: str = "qsgd:bits=4") -> str:
    return f"topk:ratio={ratio} | {code} @ local=(qsparse:sync_every={sync_every})"


def late(method: str, sync_every: int, ahead: float = 1.0) -> str:
    """Returns a local case whose syncs are delayed by a whole interval between syncs."""
    share = "" if ahead == 1 else f",ahead={ahead}"
    local = "local_sgd" if method == "none" else "qsparse"
    return f"{method} @ local=({local}:sync_every={sync_every},delay={sync_every}{share})"


RARE = (
    *DENSE,
    qsparse(0.01, 8),
    qsparse(0.001, 16),
    "efsign @ local=(qsparse:sync_every=8)",
    "int4 @ local=(qsparse:sync_every=32)",
    "powersgd:rank=4",
    late("powersgd:rank=4", 1),
    late("powersgd:rank=4", 2),
    late("powersgd:rank=4", 3),
    late("efsign", 2),
)

LATE_RESNET = (
    late("powersgd:rank=4", 1, ahead=0.6),
    late("powersgd:rank=4", 2, ahead=0.6),
    late("powersgd:rank=4", 3, ahead=0.6),
    late("powersgd:rank=16", 2, ahead=0.6),
    late("efsign", 2, ahead=0.6),
    late("none", 2),
    late("none", 2, ahead=0.6),
)

LATE_LSTM = (
    "topk:ratio=0.01",
    late("topk:ratio=0.01", 1),
    late("topk:ratio=0.01", 1, ahead=0.5),
    late("topk:ratio=0.01", 2, ahead=0.6),
    late("powersgd:rank=4", 2, ahead=0.5),
    late("efsign", 2, ahead=0.5),
    "none @ local=(local_sgd:sync_every=1)",
    late("none", 1, ahead=0.5),
)

WITH_AND_WITHOUT = (
    *DENSE,
    "topk:ratio=0.01",
    "topk:ratio=0.01 @ memory=none",
    "randomk:ratio=0.01",
    "randomk:ratio=0.01 @ memory=none",
)

FEEDBACK = (
    *WITH_AND_WITHOUT,
    *(
        case
        for method in (
            "threshold:value=0.01",
            "adaq:ratio=0.01",
            "eightbit",
            "sketchml",
            "onebit",
            "efsign",
        )
        for case in (method, f"{method} @ memory=none")
    ),
    "qsgd:bits=8",
    "qsgd:bits=8 @ memory=residual",
)
"""Eight biased methods with and without a residual, and QSGD, which needs none.

TernGrad is no contraction, and a residual is refused.
"""


def neighbors(method: str, topology: str, local: str) -> str:
    """Returns the case of a decentralised method."""
    name, *options = local.split(",")
    return f"{method} @ local=({','.join([f'{name}:topology={topology}', *options])})"


TOPOLOGIES = ("ring", "torus", "exponential")
"""Of 16 workers: two neighbors, four, and four, with spectral gaps of 0.051, 0.4 and 0.4."""


def at_equal_bytes(two: float, four: float, eight: float) -> tuple[str, ...]:
    """Returns methods that send about as many bytes a step as sharded top-k of 1 % does.

    `two`, `four` and `eight` are the ratios of top-k in that many messages a step.
    """
    found = ["topk:ratio=0.01 @ exchange=sharded"]
    for topology in TOPOLOGIES:
        choco, tracking = (two, four) if topology == "ring" else (four, eight)
        found.append(neighbors("none", topology, "dsgd"))
        found.append(neighbors(f"topk:ratio={choco}", topology, "choco,gamma=0.1"))
        found.append(neighbors(f"topk:ratio={tracking}", topology, "cgt,gamma=0.05"))
    return tuple(found)


RING_AT_ONE_PERCENT = tuple(
    neighbors("topk:ratio=0.01", "ring", f"choco,gamma={gamma}") for gamma in (0.3, 0.1, 0.03)
)
"""CHOCO-SGD with 1 % on a ring, whose gamma has to be found."""


_METHODS = (
    "topk:ratio=0.01",
    "chunktopk:k=41,chunk=4096",
    "efsign",
    "int4",
    "powersgd:rank=4",
    "dct:k=1,chunk=64",
)

BOTH_SIDES = (
    BASELINE,
    "topk:ratio=0.01 @ side=update",
    "topk:ratio=0.01",
    "none @ side=update",
    "torch-bf16",
    *(case for method in _METHODS[1:] for case in (f"{method} @ side=update", method)),
)
"""Methods on gradients, and on the updates of each worker's own optimiser; the first three show
most."""

LESS_MOMENTUM = (
    BASELINE,
    "topk:ratio=0.01 @ side=update,beta1=0.5",
    "topk:ratio=0.01",
    "topk:ratio=0.01 @ beta1=0.5",
    "none @ beta1=0.5",
    *BOTH_SIDES[1:2],
    *BOTH_SIDES[3:5],
    *(
        case
        for method in _METHODS[1:]
        for case in (f"{method} @ side=update,beta1=0.5", f"{method} @ side=update", method)
    ),
)
"""The same under Adam, whose momentum adds to the delay of error feedback: also with less of it."""


def cser(updates: int, errors: int, sync_every: int, qsparse: int) -> tuple[str, ...]:
    """Returns CSER, error feedback at every step, and Qsparse, all at the same overall ratio."""

    def blocks(ratio: float) -> str:
        return f"grbs:ratio={1 / ratio!r},block=256"

    overall = 1 / (1 / updates + 1 / (errors * sync_every))
    return (
        f"{blocks(updates)} @ local=(cser:sync_every={sync_every},errors=({blocks(errors)}))",
        f"{blocks(overall)} @ local=(qsparse:sync_every=1)",
        f"{blocks(qsparse)} @ local=(qsparse:sync_every=8)",
    )


def by_gravac(method: str, epsilon: float, *options: str, window: int = 500) -> str:
    rule = f"gravac:low=10,high=1000,window={window},epsilon={epsilon},omega=0.01"
    return f"{method}:ratio=0.1 @ controller=({','.join([rule, *options])})"


def gravac(method: str) -> tuple[str, ...]:
    """Returns a method under GraVAC, and the two ends of its range.

    With top-k, 1000x keeps 0.28 of the norm of a raw gradient once the residual has grown: an
    epsilon of 0.25 admits the whole range, one of 0.7 factors up to 40.
    """
    ends = f"{method}:ratio=0.1", f"{method}:ratio=0.001"
    return by_gravac(method, 0.25, RAW), *ends


def gravac_table(
    window: int, methods: tuple[str, ...] = ("topk", "dgc", "redsync", "randomk")
) -> tuple[str, ...]:
    """Returns each method at 10x and 1000x and under GraVAC, and Accordion against GraVAC."""
    found = []
    for method in methods:
        found += [f"{method}:ratio=0.1", f"{method}:ratio=0.001"]
        for rule in (
            f"gravac-paper:window={window}",
            f"gravac-paper:window={window},epsilon=0.9",
            f"gravac:window={window}",
        ):
            found.append(f"{method}:ratio=0.1 @ controller=({rule})")
    if "randomk" in methods:
        wide = "low=1.5,high=1000"
        geometric = f"gravac-paper:{wide},window={window},policy=geometric"
        levels = "accordion:low=0.6667,high=0.001,interval=2"
        found += [f"randomk:ratio=0.5 @ controller=({rule})" for rule in (geometric, levels)]
    return tuple(found)
