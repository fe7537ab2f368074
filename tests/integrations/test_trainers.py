"""Trainers of others are guests: they come when asked for, and say when they are not there."""

import subprocess
import sys

import pytest

from gradwire import ConfigError
from gradwire.integrations.trainers import VERSIONS, check_version

ABSENT = """
import sys, importlib, gradwire
for guest in {guests}:
    assert guest not in sys.modules, guest + " came without being asked for"
    sys.modules[guest] = None
    try:
        importlib.import_module("gradwire.integrations." + guest)
    except gradwire.MissingExtra as error:
        print(error)
"""


def test_who_is_absent_is_named() -> None:
    script = ABSENT.format(guests=[*VERSIONS])
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    )
    assert ran.stdout.splitlines() == [
        f"gradwire.integrations.{guest} needs {guest}: pip install 'gradwire[{guest}]'"
        for guest in VERSIONS
    ]


@pytest.mark.parametrize("guest", VERSIONS)
def test_versions_that_nobody_tried_are_refused(guest: str) -> None:
    oldest, unknown = VERSIONS[guest]
    check_version(guest)
    check_version(guest, oldest)
    check_version(guest, f"{oldest}.3")
    for wrong in ("0.9.1", unknown, f"{unknown}.1.0"):
        with pytest.raises(
            ConfigError, match=f"needs {guest} >= {oldest} and < {unknown}, got {wrong}"
        ):
            check_version(guest, wrong)
