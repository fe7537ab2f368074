"""The machine and the device that a benchmark runs on.

Collects the facts that a measured time depends on, checks the device and waits for its work.
"""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import gradwire
from gradwire.errors import ConfigError


def machine_facts() -> dict[str, str]:
    """Processor, usable cores and versions, as short strings for people."""
    return {
        "cpu": _cpu_name(),
        "cores": str(_usable_cores()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numba": _version("numba"),
        "triton": _version("triton"),
        "gradwire": gradwire.__version__,
        "commit": commit(),
    }


@cache
def commit() -> str:
    """The commit of this checkout, with a word if it was changed since; else "unknown"."""
    package = Path(gradwire.__file__).parent
    # A package installed into some project's folder is not described by that project's commit.
    if not (package.parents[1] / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _cpu_name() -> str:
    """The model name that Linux reports; elsewhere what the platform calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _usable_cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine has."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
