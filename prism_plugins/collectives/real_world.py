"""The processes that run now: their store, their gloo groups, and what is said when one does not come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as _c10d

from prism_plugins.errors import PrismError
from prism_plugins.program.slices import SliceSpec


class CollectiveTimeoutError(PrismError):
    """A real partner did not join a call in time: it died, is stuck, or issued something else."""


class RealWorld:
    """What the real ranks share: a store, and one gloo group over all of them for point-to-point calls.

    Args:
        spec: ``real_ranks`` and ``store``.
    """

    def __init__(self, spec: SliceSpec) -> None:
        self.ranks = tuple(sorted(spec.real_ranks))
        self.rank = spec.rank
        self.exchanges_all = spec.device != "virtual"
        self.timeout = timedelta(seconds=float(os.environ.get("PRISM_REAL_TIMEOUT_S", "300")))
        self._address = spec.store
        self._run = os.path.basename(os.path.dirname(os.path.dirname(spec.slice_dir)))
        self._store: Any = None
        self._num_meetings = 0
        self._outstanding: list[tuple[Any, Tensor]] = []
        self.p2p: Any = None

    def covers(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks are real."""
        return set(ranks) <= set(self.ranks)

    def make_gloo(self, name: str, ranks: Sequence[int]) -> Any:
        """A gloo group; blocks until all its members ask for it."""
        store = _c10d.PrefixStore(f"prism/{self._run}/{name}", self.store)
        with explained(f"connecting group {name}", ranks, self.timeout):
            return _c10d.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout=self.timeout)

    @property
    def store(self) -> Any:
        """The TCPStore of the launch, connected to on first use."""
        if self._store is None:
            host, _, port = self._address.rpartition(":")
            with explained(f"connecting to the store at {self._address}", self.ranks, self.timeout):
                self._store = _c10d.TCPStore(
                    host, int(port), world_size=None, is_master=False, timeout=self.timeout,
                    wait_for_workers=False,
                )  # fmt: skip
        return self._store

    def keep(self, work: Any, payload: Tensor) -> None:
        """Keep a send alive until its partner has taken it; scripts may drop the handle."""
        self._outstanding = [pair for pair in self._outstanding if not pair[0].is_completed()]
        self._outstanding.append((work, payload))

    def connect(self) -> None:
        """Meet the other real ranks. Called from ``init_process_group``, which all of them call."""
        self._num_meetings += 1
        self.p2p = self.make_gloo(f"p2p/{self._num_meetings}", self.ranks)


@contextmanager
def explained(what: str, ranks: Sequence[int], timeout: timedelta) -> Iterator[None]:
    """Turn the time-outs and connection errors of gloo and the store into one line for the user."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        names = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
        raise CollectiveTimeoutError(
            f"{what} with rank(s) {names} failed within {timeout.total_seconds():.0f} s: {text}; a partner died, "
            "is stuck or issued another call (PRISM_REAL_TIMEOUT_S sets the limit)"
        ) from error
