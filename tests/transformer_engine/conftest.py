"""Transformer Engine's Python layer for the tests of this folder: installed, set up before, or obtained now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integrations.transformer_engine.loader import VERSION_VARIABLE
from prism_plugins.integrations.transformer_engine.obtain import DEFAULT_VERSION, set_up, set_up_versions


@pytest.fixture(scope="session")
def te_environment():
    """Variables under which a process finds Transformer Engine of the version that the tests are written for."""
    pytest.importorskip("megatron.core")
    chosen = os.environ.get(VERSION_VARIABLE, "none")
    if chosen != "none":
        return {}
    if DEFAULT_VERSION not in set_up_versions():
        try:
            set_up(DEFAULT_VERSION, select=False)
        except PrismError as error:
            pytest.skip(f"Transformer Engine's Python layer cannot be obtained here: {error}")
    return {VERSION_VARIABLE: DEFAULT_VERSION}


@pytest.fixture(scope="session")
def run_models(te_environment, tmp_path_factory):
    """A function that builds models in one process and returns what they recorded; see te_worker.py."""

    def run(cases, cluster="dgx-h100"):
        folder = tmp_path_factory.mktemp("te")
        (folder / "cases.json").write_text(json.dumps(cases))
        done = subprocess.run(
            [sys.executable, Path(__file__).parent / "te_worker.py", folder / "cases.json", folder, cluster],
            capture_output=True,
            text=True,
            timeout=500,
            env=os.environ | te_environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run
