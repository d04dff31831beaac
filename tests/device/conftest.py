"""Sends the functions of modules that name a DEVICE to a process that has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("device_process", Path(__file__).parent / "device_process.py")
device_process = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device_process)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    device = getattr(pyfuncitem.module, "DEVICE", None)
    if device is None:
        return None
    callspec = getattr(pyfuncitem, "callspec", None)
    trouble = device_process.run_on_device(
        device, pyfuncitem.path, pyfuncitem.originalname, dict(callspec.params) if callspec else {}
    )
    if trouble:
        pytest.fail(trouble, pytrace=False)
    return True


def pytest_sessionfinish():
    device_process.stop_processes()
