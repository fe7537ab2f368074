"""The convergence studies: what is trained with which methods, and for how long."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from laconic.bench.records.kinds import BASELINE
from laconic.errors import ConfigError

_RESNET = "resnet9:bf16=true"
_EPOCH = 97
"""Steps in which 8 workers take all of CIFAR-10, 64 images each at a time."""

_NARROW = f"{_RESNET},flat=true,width=32,batch_size=32,learning_rate=0.2"
"""Small enough for runs of 5,000 steps, half as many images a step, one vector of weights."""

_RAW = "gain_ref=raw"
"""Gains as GraVAC's code has them, which is what its thresholds are meant for."""

_EPOCHS_OF_FOUR = 195, 332
"""Steps in which 4 workers take all of CIFAR-10, and all of Penn Treebank."""

_SHORT_GRAVAC = f"controller=(gravac:low=10,high=1000,window=100,epsilon=0.25,{_RAW})"
_ACCORDION = "controller=(accordion:low=0.1,high=0.001,interval=1)"


@dataclass(frozen=True)
class Study:
    """Every case with every seed; a case is anything that `laconic bench train` takes."""

    shows: str
    workload: str
    steps: int
    cases: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    workers: int = 8
    looks: int = 12
    target: str | None = None
    rates: tuple[str, ...] = ("10gbit", "1gbit", "100mbit")
    latency: str = "0.1ms"

    def changed(
        self,
        workload: str | None,
        steps: int | None,
        seeds: tuple[int, ...] | None,
        cases: Iterable[str] | None,
    ) -> "Study":
        """The same but for what is given."""
        return replace(
            self,
            workload=workload or self.workload,
            steps=self.steps if steps is None else steps,
            seeds=seeds or self.seeds,
            cases=tuple(cases or self.cases),
        )


def _qsparse(ratio: float, gap: int, code: str = "qsgd:bits=4") -> str:
    return f"topk:ratio={ratio} | {code} @ local=(qsparse:sync_every={gap})"


def _late(method: str, gap: int, ahead: float = 1.0) -> str:
    """All of a gap to travel in."""
    share = "" if ahead == 1 else f",ahead={ahead}"
    local = "local_sgd" if method == "none" else "qsparse"
    return f"{method} @ local=({local}:sync_every={gap},delay={gap}{share})"


_RARE = (
    BASELINE,
    _qsparse(0.01, 8),
    _qsparse(0.001, 16),
    "efsign @ local=(qsparse:sync_every=8)",
    "int4 @ local=(qsparse:sync_every=32)",
    "powersgd:rank=4",
    _late("powersgd:rank=4", 1),
    _late("powersgd:rank=4", 2),
    _late("powersgd:rank=4", 3),
    _late("efsign", 2),
)

_LATE_RESNET = (
    _late("powersgd:rank=4", 1, ahead=0.6),
    _late("powersgd:rank=4", 2, ahead=0.6),
    _late("powersgd:rank=4", 3, ahead=0.6),
    _late("powersgd:rank=16", 2, ahead=0.6),
    _late("efsign", 2, ahead=0.6),
    _late("none", 2),
    _late("none", 2, ahead=0.6),
)

_LATE_LSTM = (
    "topk:ratio=0.01",
    _late("topk:ratio=0.01", 1),
    _late("topk:ratio=0.01", 1, ahead=0.5),
    _late("topk:ratio=0.01", 2, ahead=0.6),
    _late("powersgd:rank=4", 2, ahead=0.5),
    _late("efsign", 2, ahead=0.5),
    "none @ local=(local_sgd:sync_every=1)",
    _late("none", 1, ahead=0.5),
)

_LONG_LSTM = 30 * _EPOCHS_OF_FOUR[1]

_WITH_AND_WITHOUT = (
    BASELINE,
    "topk:ratio=0.01",
    "topk:ratio=0.01 @ memory=none",
    "randomk:ratio=0.01",
    "randomk:ratio=0.01 @ memory=none",
)


def _cser(updates: int, errors: int, gap: int, qsparse: int) -> tuple[str, ...]:
    """CSER, error feedback at every step, and Qsparse, all at the same overall ratio."""

    def blocks(ratio: float) -> str:
        return f"grbs:ratio={1 / ratio!r},block=256"

    overall = 1 / (1 / updates + 1 / (errors * gap))
    return (
        f"{blocks(updates)} @ local=(cser:sync_every={gap},errors=({blocks(errors)}))",
        f"{blocks(overall)} @ local=(qsparse:sync_every=1)",
        f"{blocks(qsparse)} @ local=(qsparse:sync_every=8)",
    )


def _by_gravac(method: str, epsilon: float, *options: str, window: int = 500) -> str:
    rule = f"gravac:low=10,high=1000,window={window},epsilon={epsilon},omega=0.01"
    return f"{method}:ratio=0.1 @ controller=({','.join([rule, *options])})"


def _gravac(method: str) -> tuple[str, ...]:
    """A method that GraVAC sets, and the ends of its range.

    With top-k inside, 1000x keeps 0.28 of the norm of a gradient as it came, when the residual has
    grown: an epsilon of 0.25 lets the whole range pass, one of 0.7 factors up to 40.
    """
    ends = f"{method}:ratio=0.1", f"{method}:ratio=0.001"
    return _by_gravac(method, 0.25, _RAW), *ends


STUDIES: Mapping[str, Study] = {
    "cifar10": Study(
        "time to accuracy of methods that talk at every step",
        _RESNET,
        12 * _EPOCH,
        (
            BASELINE,
            "torch-fp16",
            "topk:ratio=0.01",
            "topk:ratio=0.001",
            "powersgd:rank=4",
            "powersgd:rank=1",
            "efsign",
            "qsgd:bits=4",
            "terngrad",
            "randomk:ratio=0.01",
            "dgc:ratio=0.01",
            "onebit",
            "topk:ratio=0.01 | qsgd:bits=4",
            "signsgd",
        ),
        seeds=(0, 1),
        target="accuracy=0.9",
    ),
    "error-feedback": Study(
        "what error feedback is worth to sparsifiers, beside GRACE's table",
        _RESNET,
        12 * _EPOCH,
        _WITH_AND_WITHOUT,
        target="accuracy=0.9",
    ),
    "error-feedback-long": Study(
        "the same in a run that is long beside the steps that an entry waits",
        _NARROW,
        5200,
        _WITH_AND_WITHOUT,
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "exchanges": Study(
        "what choosing a second time, shard by shard, costs top-k",
        _RESNET,
        12 * _EPOCH,
        (BASELINE, "topk:ratio=0.01", "topk:ratio=0.01 @ exchange=sharded"),
        target="accuracy=0.9",
    ),
    "qsparse": Study(
        "bytes to accuracy of Qsparse-local-SGD against top-k SGD with the same k",
        _NARROW,
        5200,
        (
            BASELINE,
            "topk:ratio=0.01,values=fp32",
            _qsparse(0.01, 8),
            _qsparse(0.01, 16),
            _qsparse(0.01, 8, "sign"),
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "rare-resnet18": Study(
        "whether the fastest over slow links, four workers' local steps, are as accurate as dense",
        "resnet18:bf16=true",
        10 * _EPOCHS_OF_FOUR[0],
        (*_RARE, *_LATE_RESNET),
        workers=4,
        looks=10,
        target="accuracy=0.9",
    ),
    "rare-lstm": Study(
        "the same for the large model of Zaremba et al.",
        "lstm_ptb",
        5 * _EPOCHS_OF_FOUR[1],
        (*_RARE, *_LATE_LSTM),
        workers=4,
        looks=5,
    ),
    "late-resnet18": Study(
        "whether late means are as accurate in three times as many steps at half the rate",
        "resnet18:bf16=true,learning_rate=0.1",
        30 * _EPOCHS_OF_FOUR[0],
        (BASELINE, _late("efsign", 2, ahead=0.6), _late("efsign", 2), _late("efsign", 3)),
        workers=4,
        looks=10,
        target="accuracy=0.92",
        rates=("1gbit",),
    ),
    "long-lstm": Study(
        "what late means have to reach in thirty epochs, and what talking at every step does",
        "lstm_ptb",
        _LONG_LSTM,
        (
            BASELINE,
            "powersgd:rank=1",
            _by_gravac("topk", 0.25, _RAW, window=200),
            "topk:ratio=0.1",
            "topk:ratio=0.001",
        ),
        workers=4,
        looks=15,
        rates=("1gbit",),
    ),
    "late-lstm": Study(
        "whether late means reach it where workers clip their own gradients at twice the norm",
        "lstm_ptb:clip_norm=0.5",
        _LONG_LSTM,
        (
            _late("topk:ratio=0.005", 2, ahead=0.5),
            _late("topk:ratio=0.01", 2, ahead=0.5),
            _late("topk:ratio=0.01", 3, ahead=0.5),
        ),
        workers=4,
        looks=15,
        rates=("1gbit",),
    ),
    "cser": Study(
        "CSER against error feedback and Qsparse at the same overall ratio: 32, 256, 1024",
        # A quarter of the learning rate, since rare words allow less.
        f"{_RESNET},flat=true,learning_rate=0.1",
        12 * _EPOCH,
        (
            BASELINE,
            *_cser(updates=512, errors=16, gap=32, qsparse=32),
            *_cser(updates=64, errors=4, gap=16, qsparse=4),
            *_cser(updates=2048, errors=8, gap=256, qsparse=128),
        ),
        target="accuracy=0.9",
    ),
    "gravac": Study(
        "GraVAC against the ends of its range, long enough for windows of 500 steps",
        _NARROW,
        5200,
        (
            BASELINE,
            *_gravac("topk"),
            _by_gravac("topk", 0.7, _RAW),
            _by_gravac("topk", 0.7),
            *_gravac("randomk"),
            _by_gravac("randomk", 0.7),
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "gravac-thresholds": Study(
        "the same for methods that estimate a threshold",
        _NARROW,
        5200,
        (BASELINE, *_gravac("redsync"), *_gravac("dgc")),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "gravac-accordion": Study(
        "GraVAC against Accordion with random-k inside, from 1.5x to 1000x",
        _NARROW,
        5200,
        (
            BASELINE,
            "randomk:ratio=0.5 @ controller=(gravac:low=1.5,high=1000,window=500,epsilon=0.7,"
            f"policy=geometric,{_RAW})",
            "randomk:ratio=0.5 @ controller=(accordion:low=0.6667,high=0.001,interval=2)",
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "accordion": Study(
        "Accordion's two levels, alone and in turn, for top-k and PowerSGD",
        _RESNET,
        12 * _EPOCH,
        (
            BASELINE,
            "powersgd:rank=2 @ controller=(accordion:low=2,high=1,setting=rank,interval=1)",
            "powersgd:rank=2",
            "powersgd:rank=1",
            "topk:ratio=0.99 @ controller=(accordion:low=0.99,high=0.1,interval=1)",
            "topk:ratio=0.99",
            "topk:ratio=0.1",
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "autopilot": Study(
        "Autopilot, GraVAC and Accordion against a sweep of what they choose from",
        f"{_RESNET},flat=true",
        12 * _EPOCH,
        (
            BASELINE,
            "torch-fp16",
            "topk:ratio=0.1",
            "topk:ratio=0.01",
            "topk:ratio=0.001",
            "topk:ratio=0.01 @ controller=autopilot",
            f"topk:ratio=0.1 @ {_SHORT_GRAVAC}",
            f"topk:ratio=0.1 @ {_ACCORDION}",
        ),
        target="accuracy=0.9",
    ),
    "ptb": Study(
        "perplexity of methods that talk at every step, on the medium model of Zaremba et al.",
        "lstm_ptb:hidden=650",
        5 * 166,
        (
            BASELINE,
            "torch-fp16",
            "topk:ratio=0.01",
            "powersgd:rank=4",
            "efsign",
            "qsgd:bits=4",
            "dgc:ratio=0.01",
            "randomk:ratio=0.01",
        ),
        looks=5,
    ),
    "ptb-adaptive": Study(
        "GraVAC and Autopilot against what they choose from, on the small model of Zaremba et al.",
        "lstm_ptb:hidden=200",
        5200,
        (
            BASELINE,
            *_gravac("topk"),
            "topk:ratio=0.01",
            "topk:ratio=0.01 @ controller=autopilot",
        ),
        looks=13,
        rates=("1gbit",),
    ),
    "gravac-lstm": Study(
        "GraVAC against the ends of its range on the medium model of Zaremba et al., four workers",
        "lstm_ptb:hidden=650",
        5200,
        (
            BASELINE,
            _by_gravac("topk", 0.25, _RAW, window=100),
            # Of the norm 320x keeps 0.86 here and 640x 0.8, below which the gate falls back to 10x.
            _by_gravac("topk", 0.8, _RAW, "policy=geometric", window=100),
            "topk:ratio=0.1",
            "topk:ratio=0.001",
            "topk:ratio=0.01",
            "topk:ratio=0.01 @ controller=autopilot",
        ),
        workers=4,
        looks=26,
        rates=("1gbit",),
    ),
    "sparseloco": Study(
        "SparseLoCo with 30 steps between syncs against dense steps",
        "gpt:dropout=0.2",
        1500,
        (
            BASELINE,
            "none @ local=(diloco:sync_every=30)",
            "chunktopk:k=64,chunk=4096 | codebook:bits=2 @ local=(sparseloco:sync_every=30)",
        ),
    ),
}


def find_study(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"no study named {name!r}; there are {', '.join(STUDIES)}")
    return STUDIES[name]
