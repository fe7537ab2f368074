"""What all tests share: a few real ranks that live for the whole run."""

from collections.abc import Iterator

import pytest
import torch

from laconic.network.testbed import Testbed
from processes import Ranks

# Tests run beside each other: threads of their own would only wait for each other's cores.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", help="Folder of the public data sets, for tests on real data.")


LONG = (
    "test_triton",
    "test_lost_workers",
    "test_torchrun",
    "test_recipe",
    "test_follow",
    "test_long_runs",
    "test_start_methods",
    "test_lightning",
    "test_transformers",
    "test_accelerate",
    "test_testbed",
    "test_soak",
    "test_report_browser",
    "test_cli",
)
"""Files with few tests that take long: begun first, so that nobody waits for them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.stem.startswith(LONG))


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four real processes joined by gloo; starting them takes seconds, so they are kept."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two of their own, for trainers that leave marks on a process."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _no_testbed() -> str | None:
    return Testbed.reason_unavailable()


@pytest.fixture
def emulated(_no_testbed: str | None) -> None:
    """Skips the test where no emulated hosts can be had."""
    if _no_testbed is not None:
        pytest.skip(_no_testbed)
