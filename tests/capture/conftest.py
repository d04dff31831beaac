"""Sends the functions of modules that name a DEVICE to a process that has it (see tests/device)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "device_conftest", Path(__file__).parents[1] / "device" / "conftest.py"
)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
pytest_pyfunc_call = _module.pytest_pyfunc_call
pytest_sessionfinish = _module.pytest_sessionfinish
