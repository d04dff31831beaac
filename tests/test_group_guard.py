"""Groups end with the process that watched them, and only those still watched."""

import os
import signal
import subprocess
import sys
import time

import pytest

from prism_plugins.group_guard import GroupGuard

PARENT = """
import subprocess, sys, time
from prism_plugins.group_guard import GroupGuard
guard = GroupGuard()
children = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
for child in children:
    guard.watch(child.pid)
guard.forget(children[1].pid)
print(*(child.pid for child in children), flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_killed_process_takes_its_groups_along():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    first, forgotten, last = map(int, parent.stdout.readline().split())
    try:
        assert all(alive(pid) for pid in (first, forgotten, last))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while (alive(first) or alive(last)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(first)
        assert not alive(last)
        assert alive(forgotten)
    finally:
        os.kill(forgotten, signal.SIGKILL)


def test_nothing_is_left_after_close():
    guard = GroupGuard()
    guard.close()
    guard.watch(2**22 + 1)  # More than Linux gives away.
    shell = guard._shell
    guard.forget(2**22 + 1)
    guard.close()
    assert shell.returncode == 0


def test_without_its_shell_it_is_silent():
    guard = GroupGuard()
    guard.watch(2**22 + 1)
    guard._shell.kill()
    guard._shell.wait()
    guard.forget(2**22 + 1)
    guard.close()
