import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from deadlines import scaled
from gradwire import cli

Here: TypeAlias = Callable[..., tuple[int, str, str]]

GRADWIRE = [sys.executable, "-m", "gradwire"]
SHOW_NAMESPACE = "echo $RANK/$WORLD_SIZE; readlink /proc/self/ns/net"
TOKEN = "GRADWIRE_TEST_TOKEN"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """Sets a variable in the environment of all processes that the test starts."""
    word = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, word)
    return word


def gradwire(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*GRADWIRE, *words], capture_output=True, text=True, timeout=scaled(30), check=False
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a command in this process and returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gradwire", *words])
        with pytest.raises(SystemExit) as end:
            cli.run()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


def processes_with(token: str) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{TOKEN}={token}".encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:  # it ended while we looked
            continue
    return found


def all_gone(token: str) -> bool:
    """Returns True if all processes of the test, and so their namespaces, have ended."""
    deadline_s = time.monotonic() + scaled(5)
    while processes_with(token):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def visible_network() -> tuple[list[str], list[str]]:
    named = Path("/run/netns")
    return sorted(os.listdir("/sys/class/net")), sorted(os.listdir(named)) if named.exists() else []


def test_runs_the_command_on_every_host_and_leaves_nothing(emulated: None, token: str) -> None:
    before = visible_network()
    done = gradwire("net", "--workers", "3", "--rate", "100mbit", "--", "sh", "-c", SHOW_NAMESPACE)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"[0] 0/3", "[1] 1/3", "[2] 2/3"} <= set(done.stdout.splitlines())
    made = set(re.findall(r"net:\[\d+\]", done.stdout))
    assert len(made - {os.readlink("/proc/self/ns/net")}) == 3
    assert all_gone(token)
    assert visible_network() == before


def test_options_of_the_command_are_its_own(emulated: None) -> None:
    done = gradwire("net", "--workers", "1", "sh", "-c", "echo $1", "sh", "--rate")
    assert done.stdout == "[0] --rate\n"


def test_passes_on_the_exit_code_of_a_failing_worker(emulated: None, token: str) -> None:
    before = visible_network()
    script = "[ $RANK = 0 ] && exit 42; sleep 50"
    assert gradwire("net", "--workers", "2", "--", "sh", "-c", script).returncode == 42
    assert all_gone(token)
    assert visible_network() == before


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_leaves_nothing(
    emulated: None, token: str, number: signal.Signals, code: int
) -> None:
    before = visible_network()
    # A shell that runs the tests in the background passes on an ignored SIGINT.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Silent after that, so that no broken pipe ends them; their child must end, too.
    script = "echo tick; sleep 50 & wait"
    with subprocess.Popen(
        [*GRADWIRE, "net", "--workers", "2", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        signal.signal(signal.SIGINT, previous)
        assert process.stdout is not None
        assert process.stdout.readline().endswith("tick\n")
        assert len(processes_with(token)) >= 3
        process.send_signal(number)
        assert process.wait(timeout=scaled(10)) == code
    assert all_gone(token)
    assert visible_network() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "gradwire: net: expected a command after the options, such as: -- python train.py"),
        (["--rate", "fast", "true"], "gradwire: rate: expected a number and bit, kbit,"),
        (["--workers", "0", "true"], "gradwire: testbed: workers must be in [1, 254], got 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(here: Here, words: list[str], message: str) -> None:
    code, out, err = here("net", *words)
    assert code == 2
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_missing_program_is_named(emulated: None, here: Here) -> None:
    code, _, err = here("net", "--", "no-such-program")
    assert code == 2
    assert err.startswith("gradwire: command: cannot run 'no-such-program'")


def test_an_unknown_command_is_named(here: Here) -> None:
    code, _, err = here("nett")
    assert code == 2
    assert "No such command 'nett'" in err


def test_missing_rights_are_reported(emulated: None) -> None:
    # PR_CAPBSET_DROP takes CAP_SYS_ADMIN from the next executed program.
    drop = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 21); "
    drop += "os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", drop, *GRADWIRE, "net", "--", "true"],
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "gradwire: net: no emulated hosts here: network namespaces need root "
        "(or CAP_SYS_ADMIN): unshare: Operation not permitted\n"
    )
