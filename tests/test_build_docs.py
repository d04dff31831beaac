"""The API reference builds from the docstrings, and its builder notices what it cannot read."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("pdoc")
SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "build_docs.py"


def build(out, *modules, **env):
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *modules],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, **env},
    )  # fmt: skip


def test_every_module_is_in_the_reference(tmp_path):
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "prism_plugins" / "integration.html").read_text()
    assert "Integration" in page
    assert (tmp_path / "prism_plugins" / "integrations" / "megatron.html").exists()
    assert (tmp_path / "prism_plugins" / "world" / "layout.html").exists()
    assert (tmp_path / "index.html").exists()


def test_what_cannot_be_resolved_fails(tmp_path):
    (tmp_path / "odd.py").write_text(
        "from __future__ import annotations\ndef f(x: nowhere.Thing) -> None:\n    pass\n"
    )
    done = build(tmp_path / "out", "odd", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "nowhere" in done.stderr
