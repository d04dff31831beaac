"""The child process of a full emulation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_SEARCH = """
import sys
from pathlib import Path
from prism_plugins.options import Job, Options
from prism_plugins.tune import emulate
code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(120)"
emulate.emulation_command = lambda *args, **kwargs: [sys.executable, "-c", code]
job = Job(options=Options(world_size=8), run_as="script", argv=("train.py",))
emulate.emulate(job, ["train.py"], cluster=Path("c.toml"), out=Path("runs/a"), seconds=120)
"""


def test_an_emulation_does_not_outlive_a_search_that_is_killed(tmp_path: Path) -> None:
    search = subprocess.Popen([sys.executable, "-c", _SEARCH], cwd=tmp_path)
    told = tmp_path / "pid"
    _wait(lambda: told.exists() and told.read_text() != "")
    pid = int(told.read_text())
    search.kill()
    search.wait()
    _wait(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait(until, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_emulation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    code = _SEARCH.replace("seconds=120", "seconds=1.0")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    pid = tmp_path / "pid"
    assert not pid.exists() or not _lives(int(pid.read_text()))
    assert os.listdir(tmp_path / "runs") == ["a.log"]
