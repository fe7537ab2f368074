"""The device that a benchmark computes on: whether it is there, what it is, and when it is done."""

import torch

from laconic.errors import ConfigError


def check_device(name: str) -> None:
    """Raises before anything is started on a device that is not there."""
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"bench: device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench: device 'cuda' asked for, but torch sees no GPU here")


def device_name(name: str) -> str:
    """What records call it: the card's own name, or cpu."""
    return torch.cuda.get_device_name() if name == "cuda" else name


def device_facts(name: str) -> dict[str, str]:
    """What a time measured on the device depends on, beside what `machine_facts` says."""
    if name == "cpu":
        return {}
    backends = torch.backends
    flags = {
        "convolutions": backends.cudnn.allow_tf32,
        "matrices": backends.cuda.matmul.allow_tf32,
    }
    tf32 = ", ".join(name for name, allowed in flags.items() if allowed) or "none"
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda or "none",
        "tf32": tf32,
    }


def hurry() -> None:
    """Lets a GPU multiply float32 in TF32, and cuDNN choose its algorithms by trying them."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that it was told; a CPU has always."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
