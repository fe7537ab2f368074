import os
import signal
import subprocess
import time

from gradwire.testbed.watchdog import Keeper


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "50"], start_new_session=True)


def test_kills_what_it_still_watches_when_the_pipe_closes() -> None:
    watched, forgotten = sleeper(), sleeper()
    keeper = Keeper()
    for process in (watched, forgotten):
        keeper.watch(process.pid)
    keeper.forget(forgotten.pid)
    assert watched.poll() is None
    keeper.close()
    assert watched.wait(timeout=5) == -signal.SIGKILL
    assert forgotten.poll() is None
    forgotten.kill()
    forgotten.wait()


def test_one_that_was_killed_does_no_harm() -> None:
    process = sleeper()
    keeper = Keeper()
    os.kill(keeper._process.pid, signal.SIGKILL)
    time.sleep(0.1)
    keeper.watch(process.pid)
    keeper.close()
    assert process.poll() is None
    process.kill()
    process.wait()
