"""Trainer packages are imported on demand; a missing one raises the install line."""

import subprocess
import sys

import pytest

from deadlines import scaled
from gradwire import ConfigError
from gradwire.integrations.trainers import VERSIONS, check_version

ABSENT = """
import sys, importlib, gradwire
for package in {packages}:
    assert package not in sys.modules, package + " was imported without need"
    sys.modules[package] = None
    try:
        importlib.import_module("gradwire.integrations." + package)
    except gradwire.MissingExtra as error:
        print(error)
"""


def test_a_missing_package_is_named() -> None:
    script = ABSENT.format(packages=[*VERSIONS])
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=scaled(50),
    )
    assert ran.stdout.splitlines() == [
        f"gradwire.integrations.{package} needs {package}: pip install 'gradwire[{package}]'"
        for package in VERSIONS
    ]


@pytest.mark.parametrize("package", VERSIONS)
def test_untested_versions_are_refused(package: str) -> None:
    oldest, unknown = VERSIONS[package]
    check_version(package)
    check_version(package, oldest)
    check_version(package, f"{oldest}.3")
    for wrong in ("0.9.1", unknown, f"{unknown}.1.0"):
        with pytest.raises(
            ConfigError, match=f"needs {package} >= {oldest} and < {unknown}, got {wrong}"
        ):
            check_version(package, wrong)
