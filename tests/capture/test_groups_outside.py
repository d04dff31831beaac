"""Which groups a rank uses outside of its iterations."""

from __future__ import annotations

from prism_plugins.capture import call_recorder
from prism_plugins.capture.call_recorder import CallRecorder
from prism_plugins.program.model import CommSignature, GroupInfo


class Recorder(CallRecorder):
    def _add(self, kind, ref, value, flags):
        pass

    def start(self):
        self.recording, self._starting = True, False

    def stop(self):
        self.recording = False


def test_groups_of_start_up_and_of_what_lies_between_iterations(monkeypatch):
    recorder = Recorder()
    groups = [GroupInfo(ranks=tuple(range(n)), name=str(n)) for n in (2, 3, 4, 5)]
    indices = [recorder.group(group) for group in groups]

    def call(which):
        recorder.comm(CommSignature(kind="all_reduce", group=indices[which]), work=1, is_async=False)

    call(0)
    recorder.start()
    call(1)
    call(2)
    recorder.stop()
    call(2)  # logging
    call(3)
    assert recorder.groups_outside() == (groups[0], groups[2], groups[3])
    monkeypatch.setattr(call_recorder, "MAX_GROUP", 4)
    assert recorder.groups_outside() == (groups[0], groups[2])
