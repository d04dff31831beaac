"""What a slice does with process groups before its first iteration: which it makes, what it calls on them.

Later slices must do the same in the same order, or the job hangs while it starts: :mod:`prism_plugins.checks.startup`
compares them. Kept short: equal neighbours are counted, lists of ranks become a digest.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from prism_plugins.program.model import CommSignature, GroupInfo
from prism_plugins.program.slices import DataLoaderUse, GroupsMade, Startup, StartupCall

_MAX_CALLS = 20_000


class StartupLog:
    """Collects in the order of the script; ends with the first iteration."""

    def __init__(self) -> None:
        self._groups: list[GroupsMade] = []
        self._calls: list[tuple[CommSignature, int]] = []
        self._loaders: dict[str, int] = {}
        self.num_calls = 0

    def group_made(self, ranks: tuple[int, ...], desc: str, site: str) -> None:
        """The script made a group (every rank makes every group, member or not)."""
        digest = ranks_digest(ranks)
        last = self._groups[-1] if self._groups else None
        if last is not None and (last.desc, last.site) == (desc, site):
            both = hashlib.blake2b((last.digest + digest).encode(), digest_size=8).hexdigest()
            self._groups[-1] = msgspec.structs.replace(last, count=last.count + 1, digest=both)
        else:
            self._groups.append(GroupsMade(desc=desc, site=site, count=1, first=ranks[:16], digest=digest))

    def call(self, signature: CommSignature) -> None:
        """A collective was called outside an iteration."""
        self.num_calls += 1
        if self._calls and self._calls[-1][0] == signature:
            self._calls[-1] = (signature, self._calls[-1][1] + 1)
        elif len(self._calls) < _MAX_CALLS:
            self._calls.append((signature, 1))

    def loader(self, site: str, num_batches: int) -> None:
        """A data loader of known length begins to be read."""
        self._loaders.setdefault(site, num_batches)

    def result(self, groups: list[GroupInfo]) -> Startup:
        """For the report; ``groups`` is the table that the signatures refer to."""
        keys = [(g.desc or g.name, len(g.ranks), ranks_digest(g.ranks)) for g in groups]
        return Startup(
            groups=tuple(self._groups),
            calls=tuple(
                StartupCall(
                    group=keys[s.group][0],
                    group_size=keys[s.group][1],
                    group_digest=keys[s.group][2],
                    call=msgspec.structs.replace(s, group=0, site=""),
                    site=s.site,
                    count=count,
                )
                for s, count in self._calls
            ),
            loaders=tuple(DataLoaderUse(site=site, num_batches=n) for site, n in self._loaders.items()),
            num_dropped=self.num_calls - sum(count for _, count in self._calls),
        )


def ranks_digest(ranks: tuple[int, ...]) -> str:
    """A short name for a list of ranks."""
    return hashlib.blake2b(np.array(ranks, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
