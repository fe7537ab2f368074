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
    """Returns processor, usable cores and versions, as short readable strings."""
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
    """Returns the commit of this checkout, marked if dirty; "unknown" outside a checkout."""
    package = Path(gradwire.__file__).parent
    # A package that is installed inside another project's checkout must not report its commit.
    if not (package.parents[1] / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _cpu_name() -> str:
    """Returns the model name from /proc/cpuinfo, or else the name that `platform` reports."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _usable_cores() -> int:
    """Returns the cores this process may use, which may be fewer than the machine has."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_device(name: str) -> None:
    """Raises ConfigError if the device is unknown or not available."""
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"bench: device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench: device 'cuda' was requested, but torch finds no GPU")


def device_name(name: str) -> str:
    """Returns the device name for records: the GPU's model name, or cpu."""
    return torch.cuda.get_device_name() if name == "cuda" else name


def device_facts(name: str) -> dict[str, str]:
    """Returns the facts of the device that a measured time depends on."""
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


def enable_tf32() -> None:
    """Enables TF32 for float32 products on GPUs, and cuDNN's autotuning of algorithms."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished all queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
