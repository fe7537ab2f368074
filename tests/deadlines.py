"""Time limits of the tests, in one place: they scale with how slow the machine is right now.

A limit is there to end what hangs, so it must not end what merely waits for a core. Ranks and other
processes of the tests read the same factor, from an environment variable.
"""

import os

VARIABLE = "GRADWIRE_TESTS_SLOW_MACHINE"
OWN_LOAD = 2.0
"""Processes per core that the suite itself keeps busy: up to here the machine is not loaded."""
LARGEST = 10.0
"""Upper bound of the measured factor, so that a test that hangs does end."""


def set_slow_machine(factor: float) -> None:
    """Sets the smallest factor, for this process and all that it starts."""
    os.environ[VARIABLE] = str(factor)


def slowdown() -> float:
    """Returns the factor of limits: that of --slow-machine, or a larger one from the load."""
    load = os.getloadavg()[0] / (OWN_LOAD * len(os.sched_getaffinity(0)))
    return max(1.0, float(os.environ.get(VARIABLE, "1")), min(load, LARGEST))


def scaled(seconds: float) -> float:
    """Returns a time limit for this machine, as loaded as it is now."""
    return seconds * slowdown()
