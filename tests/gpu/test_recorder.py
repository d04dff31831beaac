"""The recorder of a real GPU has the interface of the other one."""

from __future__ import annotations

import inspect
import re

from prism_plugins.capture.recorder import Recorder
from prism_plugins.gpu.recorder import GpuRecorder
from prism_plugins.gpu.timing import make_schedule


def test_whatever_calls_a_recorder_can_call_this_one(tmp_path) -> None:
    recorder = GpuRecorder(make_schedule(8), work_dir=tmp_path)
    methods = {name for name in vars(Recorder) if not name.startswith("_")}
    attributes = set(re.findall(r"self\.([a-z]\w*)\b[^=\n]*=", inspect.getsource(Recorder.__init__)))
    assert {"comm", "group_made", "stats"} <= methods
    assert {"recording", "startup"} <= attributes
    assert not {name for name in methods | attributes if not hasattr(recorder, name)}
    for name in methods:
        function = vars(Recorder)[name]
        if inspect.isfunction(function):
            ours = inspect.signature(getattr(GpuRecorder, name)).parameters.values()
            wanted = inspect.signature(function).parameters
            if not any(p.kind is p.VAR_POSITIONAL for p in ours):
                assert set(wanted) <= {p.name for p in ours}, name
