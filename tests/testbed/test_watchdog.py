import os
import signal
import subprocess
import time

from deadlines import scaled
from gradwire.testbed.watchdog import Watchdog


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "50"], start_new_session=True)


def test_watched_processes_are_killed_when_the_pipe_closes() -> None:
    watched, forgotten = sleeper(), sleeper()
    watchdog = Watchdog()
    for process in (watched, forgotten):
        watchdog.watch(process.pid)
    watchdog.forget(forgotten.pid)
    assert watched.poll() is None
    watchdog.close()
    assert watched.wait(timeout=scaled(5)) == -signal.SIGKILL
    assert forgotten.poll() is None
    forgotten.kill()
    forgotten.wait()


def test_a_killed_watchdog_does_no_harm() -> None:
    process = sleeper()
    watchdog = Watchdog()
    os.kill(watchdog._process.pid, signal.SIGKILL)
    time.sleep(0.1)
    watchdog.watch(process.pid)
    watchdog.close()
    assert process.poll() is None
    process.kill()
    process.wait()
