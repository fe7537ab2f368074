"""The convergence studies: what is trained with which methods, and for how long."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from laconic.bench.local_cases import PREFIX
from laconic.bench.records import BASELINE
from laconic.errors import ConfigError

_RESNET = "resnet9:bf16=true"
_EPOCH = 97
"""Steps in which 8 workers take all of CIFAR-10, 64 images each at a time."""

_GRAVAC = "gravac:low=10,high=1000,window=500,epsilon=0.7,omega=0.01"


@dataclass(frozen=True)
class Study:
    """Every case with every seed; cases are of gradients at every step, or `local NAME`."""

    shows: str
    workload: str
    steps: int
    cases: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1)
    workers: int = 8
    looks: int = 24
    target: str | None = None
    rates: tuple[str, ...] = ("1gbit", "100mbit")
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


def _local(*names: str) -> tuple[str, ...]:
    return tuple(PREFIX + name for name in names)


def _cser(ratio: int) -> tuple[str, ...]:
    return _local(f"cser-{ratio}", f"ef-{ratio}", f"qsparse-{ratio}")


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
            "eightbit",
            "natural",
            "topk:ratio=0.01 | qsgd:bits=4",
            "signsgd",
        ),
        target="accuracy=0.9",
    ),
    "error-feedback": Study(
        "what error feedback is worth to sparsifiers, beside GRACE's table",
        _RESNET,
        12 * _EPOCH,
        (
            BASELINE,
            "topk:ratio=0.01",
            "topk:ratio=0.01 @ memory=none",
            "randomk:ratio=0.01",
            "randomk:ratio=0.01 @ memory=none",
        ),
        target="accuracy=0.9",
    ),
    "qsparse": Study(
        "bytes to accuracy of Qsparse-local-SGD against top-k SGD with the same k",
        _RESNET,
        12 * _EPOCH,
        (BASELINE, "topk:ratio=0.01,values=fp32", *_local("qtopk", "signtopk")),
        seeds=(0,),
        target="accuracy=0.9",
    ),
    "cser": Study(
        "CSER against error feedback and Qsparse at the same overall ratio",
        _RESNET,
        12 * _EPOCH,
        (BASELINE, *_cser(256), *_cser(32), *_cser(1024)),
        seeds=(0,),
        target="accuracy=0.9",
    ),
    "cser-slow": Study(
        "the same with a quarter of the learning rate, since rare words allow less",
        f"{_RESNET},learning_rate=0.1",
        12 * _EPOCH,
        (BASELINE, *_cser(256), *_cser(32), *_cser(1024)),
        seeds=(0,),
        target="accuracy=0.9",
    ),
    "gravac": Study(
        "GraVAC and Autopilot against what they choose from, long enough for windows of 500 steps",
        f"{_RESNET},flat=true",
        52 * _EPOCH,
        (
            BASELINE,
            f"topk:ratio=0.1 @ controller=({_GRAVAC})",
            "topk:ratio=0.1",
            "topk:ratio=0.001",
            "topk:ratio=0.1 @ controller=autopilot",
            f"randomk:ratio=0.1 @ controller=({_GRAVAC})",
            "randomk:ratio=0.1",
            "randomk:ratio=0.001",
        ),
        seeds=(0,),
        target="accuracy=0.92",
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
        seeds=(0,),
        target="accuracy=0.9",
        rates=("1gbit",),
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
        seeds=(0,),
        looks=8,
    ),
    "sparseloco": Study(
        "SparseLoCo with 30 steps between syncs against dense steps",
        "gpt",
        900,
        (BASELINE, *_local("diloco", "sparseloco")),
        seeds=(0,),
        looks=12,
    ),
}


def find_study(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"no study named {name!r}; there are {', '.join(STUDIES)}")
    return STUDIES[name]
