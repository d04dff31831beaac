"""Launches of the small training script in a place of its own, and what is left of them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "launch_files"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


class Place:
    def __init__(self, path):
        self.path = path
        self.out = path / "out"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PRISM_", "TORCHELASTIC_"))}
        # The compiled backend stays where it is; slices get a cache of their own.
        self.env |= {
            "PYTHONPATH": os.pathsep.join([str(FILES), self.env.get("PYTHONPATH", "")]),
            "PRISM_SLICE_CACHE": str(path / "cache"),
        }

    def command(
        self, *words, launcher=(sys.executable,), flags=("--prism-emulate", "--prism-world-size", "8")
    ):
        out = () if any(str(w).startswith("--prism-out") for w in words) else ("--prism-out", str(self.out))
        return [*launcher, *map(str, words), *flags, *out]

    def run(self, *words, check=True, timeout=180, **options):
        done = subprocess.run(
            self.command(*words, **options),
            cwd=self.path,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, done.stderr + done.stdout
        return done

    def prediction(self):
        return json.loads((self.out / "prediction.json").read_text())

    def info(self):
        return json.loads((self.out / "run.json").read_text())

    def slices(self):
        return sorted(int(p.parent.name) for p in self.out.glob("slices/*/program.npz"))


def mount(place, size):
    place.out.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place.out], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")


def wait_for(condition, timeout=90):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def slice_processes(place):
    """Processes of slices of this test, by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(place.out).encode() in line and b"prism_plugins.slice" in line:
                found.append(int(entry.name))
    return found
