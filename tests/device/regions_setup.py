"""Installs regions once in a device process, with a context that keeps what was assumed."""

from __future__ import annotations

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.device.regions import install_regions


class PlainContext:
    """Of SliceContext, what regions use."""

    def __init__(self):
        self.assumptions = []

    def patch(self, target, name, replacement, *, why):
        original = getattr(target, name)
        setattr(target, name, replacement)
        return original

    def assume(self, text):
        if text not in self.assumptions:
            self.assumptions.append(text)


CONTEXT = PlainContext()
install_regions(CONTEXT)


def recorded(run):
    """The op signatures of everything ``run`` launches, in order."""
    recorder = get_recorder()
    recorder.start()
    try:
        run()
    finally:
        iteration = recorder.stop()
    return [iteration.signatures[e["ref"]] for e in iteration.events if e["kind"] == 0]
