"""The facts about this machine that a measured time depends on."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import laconic


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
        "laconic": laconic.__version__,
        "commit": commit(),
    }


@cache
def commit() -> str:
    """The commit of this checkout, with a word if it was changed since; else "unknown"."""
    package = Path(laconic.__file__).parent
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
