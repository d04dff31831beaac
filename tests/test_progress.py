"""The streamed log stays whole: on a terminal above the live line, elsewhere as plain lines."""

import os
import pty
import re
import subprocess
import sys

CODE = """
import sys, threading, time
from prism_plugins.progress import Progress
from prism_plugins.program.slices import SliceReport
with Progress() as progress:
    progress.planned(2)
    progress.started(0, "lead")
    progress.started(7)
    def work():
        for i in range(20):
            progress.line(f"iteration {i} " + "x" * 200)
            progress.line("[a warning] [/of] the script", True)
            time.sleep(0.02)
    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    time.sleep(0.3)
    progress.finished(0, SliceReport(rank=0, status="ok", seconds=1.0, num_ops=5, num_comms=2))
    progress.stage("simulating")
    time.sleep(0.3)
"""


def on_terminal(**streams):
    """Run CODE with stderr (and stdout unless given) on a pseudo terminal of 80 columns."""
    leader, follower = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=streams.get("stdout", follower), stderr=follower, env=env
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    out = child.stdout.read().decode() if child.stdout else ""
    assert child.wait() == 0
    return seen.decode(), out


def lines_of(text):
    """What remains on the screen: escape sequences out, redrawn lines gone."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\r", text)
    return [
        line.split("\r")[-1] if not line.endswith("\r") else line.rstrip("\r").split("\r")[-1]
        for line in plain.split("\n")
    ]


def test_lines_stay_whole_above_the_live_line():
    screen, _ = on_terminal()
    assert "slices 0/2 · rank 0 (lead) " in screen
    lines = lines_of(screen)
    logged = [line for line in lines if line.startswith("iteration ")]
    assert sorted(logged) == sorted(2 * [f"iteration {i} " + "x" * 200 for i in range(20)])
    assert lines.count("[a warning] [/of] the script") == 40


def test_a_redirected_log_has_no_escape_sequences():
    _, log = on_terminal(stdout=subprocess.PIPE)
    assert "\x1b" not in log
    assert len(log.splitlines()) == 40
    assert all(line.startswith("iteration ") for line in log.splitlines())


def test_plain_lines_off_a_terminal():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stderr
    assert "prism: slice rank 0 (lead) started" in done.stderr
    assert "prism: slice rank 7 started" in done.stderr
    assert "prism: slice rank 0 done in 1.0 s: 5 ops, 2 collectives per iteration [1/2]" in done.stderr
    assert "prism: simulating" in done.stderr
    assert len(done.stdout.splitlines()) == 40
