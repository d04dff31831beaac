"""Runs test functions in a child process that has the virtual device.

The backend must be loaded before torch is imported, and torch cannot be unloaded, so device tests do not run in
pytest's own process. A test module says ``DEVICE = "virtual"`` (or ``"cpu"``); its conftest sends each function here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_processes: dict[str, subprocess.Popen] = {}


def run_on_device(device: str, path: Path, name: str, parameters: dict) -> str:
    """Run a test function in the child; returns the traceback, empty when it passed."""
    process = _processes.get(device)
    if process is None or process.poll() is not None:
        process = _processes[device] = subprocess.Popen(
            [sys.executable, __file__, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    print(json.dumps([str(path), name, parameters]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        return f"the device process died with status {process.wait()} in {name}"
    return json.loads(answer)


def stop_processes() -> None:
    """End the children."""
    while _processes:
        _, process = _processes.popitem()
        process.stdin.close()
        process.wait(timeout=60)


def _serve(device: str) -> None:
    # Tests may print; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from prism_plugins.costs.cluster import load_cluster
    from prism_plugins.device.load import install_torch_cuda, load_device
    from prism_plugins.program.slices import SliceSpec

    spec = SliceSpec(
        rank=0,
        world_size=8,
        gpus_per_node=8,
        argv=("train.py",),
        device=device,
        gpu=load_cluster("dgx-h100").gpu_facts(),
        slice_dir=".",
    )
    load_device(spec)
    import torch  # noqa: F401

    from prism_plugins.capture.recorder import get_recorder
    from prism_plugins.slice_context import Context

    install_torch_cuda(Context(spec, get_recorder()))
    modules: dict[str, object] = {}
    for line in sys.stdin:
        print(json.dumps(_run(modules, *json.loads(line))), file=answers, flush=True)
    # Autograd's device threads must not be unwound by the interpreter's exit.
    os._exit(0)


def _run(modules: dict[str, object], path: str, name: str, parameters: dict) -> str:
    import importlib.util
    import traceback

    try:
        if path not in modules:
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            modules[path] = module
        getattr(modules[path], name)(**parameters)
    except BaseException:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    _serve(sys.argv[1])
