"""Virtual peers on a real GPU: what their answers launch is no part of the job, and is marked as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ANSWERS = frozenset(
    [
        "all_reduce", "reduce", "all_gather", "all_gather_list", "gather", "broadcast", "scatter", "reduce_scatter",
        "reduce_scatter_list", "all_to_all", "all_to_all_list", "send", "recv",
    ]
)  # fmt: skip


class BracketedPeers:
    """Peers whose answers run inside ``recorder.answering()``. The methods are those of the peers.

    Args:
        peers: answer the calls.
        recorder: of the slice; the call was recorded just before.
    """

    def __init__(self, peers: Any, recorder: Any) -> None:
        self._peers = peers
        self._recorder = recorder
        for name in _ANSWERS:
            setattr(self, name, self._bracketed(getattr(peers, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)

    def _bracketed(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def bracketed(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.answering():
                return answer(*args, **kwargs)

        return bracketed
