"""The GRACE matrix: its sixteen methods by its names, and newer ones, on its tasks.

Xu et al. 2021. Settings are those of the authors' data release: 1 % of the entries, 64 levels of
QSGD, rank 1 of PowerSGD, and error feedback as they used it; where they ran both, so do we.
"""

from collections.abc import Mapping

_WARM_UP = "controller=(schedule:first=0.25,last=0.01,stages=4,length=200)"

DGC_OF_IMAGES = (
    f"dgc:ratio=0.01 @ memory=(momentum:momentum=0.9,nesterov=true), drop_momentum=true, {_WARM_UP}"
)
"""DGC with momentum correction and masking, in place of the optimiser's own momentum."""

DGC_OF_TEXT = f"dgc:ratio=0.01 @ memory=(momentum:momentum=0,clip=0.0884), {_WARM_UP}"
"""DGC with clipping on each worker, to 0.25 / √8, since the LSTM has no momentum to correct."""

GRACE_METHODS: Mapping[str, str] = {
    "8-bit": "eightbit",
    "1-bit SGD": "onebit",
    "SignSGD": "signsgd",
    "SIGNUM": "signum",
    "QSGD": "qsgd:bits=8",
    "Natural": "natural",
    "TernGrad": "terngrad",
    "EF-SignSGD": "efsign",
    "INCEPTIONN": "inceptionn",
    "Random-k": "randomk:ratio=0.01",
    "Top-k": "topk:ratio=0.01",
    "Threshold-v": "threshold:value=0.01",
    "DGC": f"dgc:ratio=0.01 @ {_WARM_UP}",
    "Adaptive": "adaq:ratio=0.01",
    "SketchML": "sketchml",
    "PowerSGD": "powersgd:rank=1",
}
"""GRACE's names, and the case of each.

DGC has its warm-up; momentum correction, masking and clipping are cases of their own, which depend
on the optimiser of the task: Adam, of NeuMF and U-Net, has no momentum that could be moved.
"""

NEWER = (
    "powersgd:rank=4",
    "int4",
    "eden",
    "acpsgd:rank=4",
    "topk:ratio=0.01 | qsgd:bits=4",
)

WITHOUT_FEEDBACK = (
    "topk:ratio=0.01 @ memory=none",
    "randomk:ratio=0.01 @ memory=none",
    "adaq:ratio=0.01 @ memory=none",
    "threshold:value=0.01 @ memory=none",
    "eightbit @ memory=none",
    "sketchml @ memory=none",
)
"""Methods that the authors also ran without error feedback."""
