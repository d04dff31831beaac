"""A recorder in plain Python, with the interface of ``prism_plugins.capture.recorder.Recorder``."""

from __future__ import annotations

import msgspec

from prism_plugins.program.model import CommSignature, GroupInfo


class FakeRecorder:
    def __init__(self) -> None:
        self.groups: list[GroupInfo] = []
        self.comms: list[tuple[CommSignature, int, bool]] = []
        self.sites: list[str] = []
        """Where the calls were made."""
        self.made: list[tuple[tuple[int, ...], str]] = []
        self.waits: list[int] = []
        self.recording = True
        self._work = 0

    def group(self, info: GroupInfo) -> int:
        if info not in self.groups:
            self.groups.append(info)
        return self.groups.index(info)

    def message(self, tensor) -> None:
        pass

    def new_work(self) -> int:
        self._work += 1
        return self._work

    def comm(self, signature: CommSignature, *, work: int, is_async: bool) -> None:
        self.sites.append(signature.site)
        self.comms.append((msgspec.structs.replace(signature, site=""), work, is_async))

    def group_made(self, ranks: tuple[int, ...], desc: str, site: str) -> None:
        self.made.append((ranks, desc))

    def wait(self, work: int) -> None:
        self.waits.append(work)

    def take(self) -> list[CommSignature]:
        """The signatures recorded so far; forgets them."""
        signatures = [c[0] for c in self.comms]
        self.comms.clear()
        self.waits.clear()
        return signatures
