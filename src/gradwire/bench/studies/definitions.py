"""The convergence studies: workload, methods, steps and seeds of each."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from gradwire.bench.studies.byzantine import BYZANTINE
from gradwire.bench.studies.cases import (
    BOTH_SIDES,
    DENSE,
    EF,
    LATE_LSTM,
    LATE_RESNET,
    LESS_MOMENTUM,
    RARE,
    RAW,
    RING_AT_ONE_PERCENT,
    SWEEP,
    at_equal_bytes,
    by_gravac,
    cser,
    gravac,
    late,
    qsparse,
)
from gradwire.bench.studies.language import LANGUAGE
from gradwire.bench.studies.paper_tables import PAPER_TABLES
from gradwire.bench.studies.study import Study
from gradwire.errors import ConfigError

_RESNET = "resnet9:bf16=true"
_EPOCH = 97
"""Steps of one epoch of CIFAR-10 with 8 workers and batches of 64 images."""

_NARROW = f"{_RESNET},flat=true,width=32,batch_size=32,learning_rate=0.2"
"""Small enough for runs of 5,000 steps: half as many images a step, one vector of weights."""

_EPOCHS_OF_FOUR = 195, 332
"""Steps of one epoch of CIFAR-10, and of Penn Treebank, with 4 workers."""

_EPOCH_OF_SIXTEEN = 83
"""Steps of one epoch of Penn Treebank with 16 workers."""

_SMALL_GPT = "gpt:layers=4,heads=4,width=128,context=64,dropout=0"
"""0.8 million parameters."""

_LONG_LSTM = 30 * _EPOCHS_OF_FOUR[1]


STUDIES: Mapping[str, Study] = {
    **PAPER_TABLES,
    **LANGUAGE,
    **BYZANTINE,
    "cifar10": Study(
        "time to accuracy of methods that exchange gradients at every step",
        _RESNET,
        12 * _EPOCH,
        (
            *DENSE,
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
        shorter=(0.5, 0.25),
    ),
    "exchanges": Study(
        "cost of the second selection, shard by shard, for top-k",
        _RESNET,
        12 * _EPOCH,
        (*DENSE, "topk:ratio=0.01", "topk:ratio=0.01 @ exchange=sharded"),
        target="accuracy=0.9",
    ),
    "qsparse": Study(
        "bytes to accuracy of Qsparse-local-SGD against top-k SGD with the same k",
        _NARROW,
        5200,
        (
            *DENSE,
            "topk:ratio=0.01,values=fp32",
            qsparse(0.01, 8),
            qsparse(0.01, 16),
            qsparse(0.01, 8, "sign"),
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "rare-resnet18": Study(
        "accuracy of local steps of four workers, fastest over slow links, against dense",
        "resnet18:bf16=true",
        10 * _EPOCHS_OF_FOUR[0],
        (*RARE, *LATE_RESNET),
        workers=4,
        evaluations=10,
        target="accuracy=0.9",
    ),
    "rare-lstm": Study(
        "local steps of four workers against dense, on the large model of Zaremba et al.",
        "lstm_ptb",
        5 * _EPOCHS_OF_FOUR[1],
        (*RARE, *LATE_LSTM),
        workers=4,
        evaluations=5,
    ),
    "late-resnet18": Study(
        "accuracy of delayed means in three times as many steps at half the learning rate",
        "resnet18:bf16=true,learning_rate=0.1",
        30 * _EPOCHS_OF_FOUR[0],
        (*DENSE, late("efsign", 2, ahead=0.6), late("efsign", 2), late("efsign", 3)),
        workers=4,
        evaluations=10,
        target="accuracy=0.92",
        rates=("1gbit",),
    ),
    "long-lstm": Study(
        "target of delayed means in thirty epochs, and methods that exchange at every step",
        "lstm_ptb",
        _LONG_LSTM,
        (
            *DENSE,
            "powersgd:rank=1",
            by_gravac("topk", 0.25, RAW, window=200),
            "topk:ratio=0.1",
            "topk:ratio=0.01",
            "topk:ratio=0.001",
            "topk:ratio=0.01 @ controller=autopilot",
        ),
        workers=4,
        evaluations=15,
        rates=("1gbit",),
    ),
    "late-lstm": Study(
        "delayed means where workers clip their own gradients at twice the norm",
        "lstm_ptb:clip_norm=0.5",
        _LONG_LSTM,
        (
            *DENSE,
            late("topk:ratio=0.005", 2, ahead=0.5),
            late("topk:ratio=0.01", 2, ahead=0.5),
            late("topk:ratio=0.01", 3, ahead=0.5),
        ),
        workers=4,
        evaluations=15,
        rates=("1gbit",),
    ),
    "cser": Study(
        "CSER against error feedback and Qsparse at the same overall ratio: 32, 256, 1024",
        # A quarter of the learning rate, since infrequent syncs allow less.
        f"{_RESNET},flat=true,learning_rate=0.1",
        12 * _EPOCH,
        (
            *DENSE,
            *cser(updates=512, errors=16, sync_every=32, qsparse=32),
            *cser(updates=64, errors=4, sync_every=16, qsparse=4),
            *cser(updates=2048, errors=8, sync_every=256, qsparse=128),
        ),
        target="accuracy=0.9",
    ),
    "gravac": Study(
        "GraVAC against the ends of its range, long enough for windows of 500 steps",
        _NARROW,
        5200,
        (
            *DENSE,
            *gravac("topk"),
            by_gravac("topk", 0.7, RAW),
            by_gravac("topk", 0.7, EF),
            *gravac("randomk"),
            by_gravac("randomk", 0.7, EF),
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "gravac-thresholds": Study(
        "GraVAC against the ends of its range, for methods that estimate a threshold",
        _NARROW,
        5200,
        (*DENSE, *gravac("redsync"), *gravac("dgc")),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "gravac-accordion": Study(
        "GraVAC against Accordion with random-k, from 1.5x to 1000x",
        _NARROW,
        5200,
        (
            *DENSE,
            "randomk:ratio=0.5 @ controller=(gravac:low=1.5,high=1000,window=500,epsilon=0.7,"
            f"policy=geometric,{RAW})",
            "randomk:ratio=0.5 @ controller=(accordion:low=0.6667,high=0.001,interval=2)",
        ),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "accordion": Study(
        "Accordion against each of its two levels, for top-k and PowerSGD",
        _RESNET,
        12 * _EPOCH,
        (
            *DENSE,
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
        "Autopilot, GraVAC and Accordion against a sweep of the settings they choose from",
        f"{_RESNET},flat=true",
        12 * _EPOCH,
        SWEEP,
        target="accuracy=0.9",
    ),
    "autopilot-long": Study(
        "Autopilot, GraVAC and Accordion in a run long enough for residuals to be sent",
        f"{_RESNET},flat=true",
        30 * _EPOCH,
        SWEEP,
        evaluations=30,
        target="accuracy=0.92",
    ),
    "ptb": Study(
        "perplexity of methods that exchange at every step, on the medium model of Zaremba et al.",
        "lstm_ptb:hidden=650",
        5 * 166,
        (
            *DENSE,
            "torch-fp16",
            "topk:ratio=0.01",
            "powersgd:rank=4",
            "efsign",
            "qsgd:bits=4",
            "dgc:ratio=0.01",
            "randomk:ratio=0.01",
        ),
        evaluations=5,
    ),
    "ptb-adaptive": Study(
        "GraVAC and Autopilot against their settings, on the small model of Zaremba et al.",
        "lstm_ptb:hidden=200",
        5200,
        (
            *DENSE,
            *gravac("topk"),
            "topk:ratio=0.01",
            "topk:ratio=0.01 @ controller=autopilot",
        ),
        evaluations=13,
        rates=("1gbit",),
    ),
    "gravac-lstm": Study(
        "GraVAC against the ends of its range on the medium model of Zaremba et al., four workers",
        "lstm_ptb:hidden=650",
        5200,
        (
            *DENSE,
            by_gravac("topk", 0.25, RAW, window=100),
            # 320x keeps 0.86 of the norm and 640x 0.8, below which the gate falls back to 10x.
            by_gravac("topk", 0.8, RAW, "policy=geometric", window=100),
            "topk:ratio=0.1",
            "topk:ratio=0.001",
            "topk:ratio=0.01",
            "topk:ratio=0.01 @ controller=autopilot",
        ),
        workers=4,
        evaluations=26,
    ),
    "gpt-adamw": Study(
        "compressed gradients under AdamW, which divides them by their running magnitude",
        _SMALL_GPT,
        400,
        (
            *DENSE,
            "torch-fp16",
            "int4",
            "qsgd:bits=4",
            "powersgd:rank=4",
            "efsign",
            "topk:ratio=0.1",
            "topk:ratio=0.01",
            "topk:ratio=0.01 @ memory=none",
            "randomk:ratio=0.01",
            "topk:ratio=0.01 @ local=(qsparse:sync_every=1)",
        ),
        seeds=(0, 1, 2),
        workers=2,
        evaluations=4,
        rates=("1gbit",),
    ),
    "optim-gpt": Study(
        "compressed updates of each worker's own AdamW against compressed gradients",
        _SMALL_GPT,
        240,
        LESS_MOMENTUM,
        seeds=(0, 1, 2),
        workers=2,
        evaluations=4,
        rates=("1gbit",),
    ),
    "optim-gpt30": Study(
        "compressed updates against compressed gradients under AdamW, on a GPT of 30 million",
        "gpt2:size=30,bf16=true",
        600,
        LESS_MOMENTUM,
        seeds=(0, 1, 2),
        workers=4,
        evaluations=4,
        rates=("1gbit",),
        by_case=True,
    ),
    "optim-resnet9": Study(
        "compressed momentum of each worker against compressed gradients under SGD",
        _RESNET,
        5 * _EPOCH,
        BOTH_SIDES,
        seeds=(0, 1, 2),
        evaluations=5,
        rates=("1gbit",),
        by_case=True,
    ),
    "decentralized": Study(
        "methods without a center on three topologies of 16 workers against all-reduce",
        f"{_RESNET},batch_size=32",
        12 * _EPOCH,
        # Bytes are those of DSGD, or of top-k of 1 %.
        (*DENSE, *RING_AT_ONE_PERCENT, *at_equal_bytes(two=0.0093, four=0.004, eight=0.0015)),
        workers=16,
        target="accuracy=0.9",
        rates=("1gbit", "100mbit"),
        by_case=True,
    ),
    "decentralized-ptb": Study(
        "methods without a center on three topologies of 16 workers against all-reduce, LSTM",
        "lstm_ptb:hidden=650",
        10 * _EPOCH_OF_SIXTEEN,
        (*DENSE, *at_equal_bytes(two=0.0093, four=0.0038, eight=0.0011)),
        workers=16,
        evaluations=10,
        rates=("1gbit", "100mbit"),
        by_case=True,
    ),
    "sparseloco": Study(
        "SparseLoCo with 30 steps between syncs against dense steps",
        "gpt:dropout=0.2",
        1500,
        (
            *DENSE,
            "none @ local=(diloco:sync_every=30)",
            "chunktopk:k=64,chunk=4096 | codebook:bits=2 @ local=(sparseloco:sync_every=30)",
        ),
    ),
}


def find_studies(name: str) -> dict[str, Study]:
    """Returns the study of that name, or all that match it: `grace`, `gravac*`.

    A name that is the beginning of others, up to a hyphen, stands for all of them.
    """
    if name in STUDIES:
        return {name: STUDIES[name]}
    found = {
        key: study
        for key, study in STUDIES.items()
        if fnmatchcase(key, name) or key.startswith(f"{name}-")
    }
    if not found:
        raise ConfigError(f"no study named {name!r}; there are {', '.join(STUDIES)}")
    return found
