"""Fixtures of all tests: a few real ranks that live for the whole run, and emulated hosts."""

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from deadlines import scaled, set_slow_machine, slowdown
from gradwire.testbed.hosts import Testbed
from processes import Ranks

# Tests run in parallel, so more threads would only compete for cores.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", help="Folder of the public data sets, for tests on real data.")
    parser.addoption(
        "--slow-machine",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="Multiplies all time limits by at least this; a loaded machine does so by itself.",
    )


def pytest_configure(config: pytest.Config) -> None:
    set_slow_machine(config.getoption("--slow-machine"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scales the limit of a test when it starts, before pytest-timeout reads it."""
    marker = item.get_closest_marker("timeout")
    limit_s = marker.args[0] if marker else item.config.getini("timeout")
    if slowdown() > 1 and item.config.getoption("--timeout") is None:
        item.add_marker(pytest.mark.timeout(scaled(float(limit_s or 0))), append=False)
    return (yield)


LONG = (
    "test_lost_workers",
    "test_torchrun",
    "test_tutorials",
    "test_recipe",
    "test_changing_link",
    "test_long_runs",
    "test_start_methods",
    "test_lightning",
    "test_transformers",
    "test_accelerate",
    "test_testbed",
    "test_soak",
    "test_report_browser",
    "test_cli",
    "test_bytes",
    "test_convergence",
)
"""Slow files: they start first, so that no worker waits for them at the end."""


def position(file: Path) -> int:
    """Returns the position of a file's tests in the order of a run.

    One worker compiles the kernels while another interprets Triton's, which takes as long and needs
    no compiled kernel; later, ranks and hosts find all compiled kernels on disk.
    """
    if file.parent.name == "kernels":
        return 0 if file.stem == "test_triton" else 1
    return 2 if file.stem.startswith(LONG) else 3


SLOW = (
    *LONG,
    "test_auto_",
    "test_autopilot_simulated",
    "test_cluster_run",
    "test_compiled",
    "test_control_ddp",
    "test_control_integrations",
    "test_dcp",
    "test_dense_allreduce",
    "test_dependencies",
    "test_fsdp",
    "test_fuzz",
    "test_gpt2",
    "test_gravac_simulated",
    "test_guarded",
    "test_guards",
    "test_handle",
    "test_how_tos",
    "test_integration_",
    "test_kernel_validation",
    "test_local_case",
    "test_local_examples",
    "test_one_clock",
    "test_own_methods",
    "test_probe",
    "test_reference_pages",
    "test_site_",
    "test_snippets",
    "test_step_bench",
    "test_study",
    "test_tokens",
    "test_train",
    "test_triton",
    "test_validation",
    "test_wheel",
    "test_workloads",
)
"""Files that make test-fast leaves out: many processes, whole trainings, compilers, the site,
and those of packages that only the extra `dev` has."""

MOST_CASES = 16
"""Of a test with more cases than this, make test-fast takes some, evenly spread."""


def mark_slow(items: list[pytest.Item]) -> None:
    tests = [item.nodeid.partition("[")[0] for item in items]
    cases, seen = Counter(tests), Counter[str]()
    for item, test in zip(items, tests, strict=True):
        left_out = seen[test] % -(-cases[test] // MOST_CASES)
        seen[test] += 1
        if left_out or item.path.stem.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)
    items.sort(key=lambda item: position(item.path))


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four real processes joined by gloo; starting them takes seconds, so they are kept."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two separate processes, for trainers that change the global state of a process."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _no_testbed() -> str | None:
    return Testbed.reason_unavailable()


@pytest.fixture
def emulated(_no_testbed: str | None) -> None:
    """Skips the test if emulated hosts are not available."""
    if _no_testbed is not None:
        pytest.skip(_no_testbed)
