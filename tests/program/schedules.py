"""Schedules of pipeline stages, written down independently of any framework, for tests."""

from __future__ import annotations

from collections import Counter

from prism_plugins.program.model import Phase


class Schedule:
    """Collects phases and counts their parts."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, *names: str, microbatch: int = -1, chunk: int = -1) -> None:
        parts = []
        for name in names:
            parts.append((name, self._counts[name]))
            self._counts[name] += 1
        self.phases.append(Phase(kind=kind, microbatch=microbatch, chunk=chunk, parts=tuple(parts)))


def one_f_one_b(*, stage: int, num_stages: int, num_microbatches: int) -> tuple[Phase, ...]:
    """The non-interleaved schedule (Narayanan et al. 2021, figure 4), with Megatron's p2p calls."""
    first, last = stage == 0, stage == num_stages - 1
    warmup = min(num_stages - stage - 1, num_microbatches)
    steady = num_microbatches - warmup
    s = Schedule()
    to_next = () if last else ("send_forward",), () if last else ("recv_backward",)
    to_previous = () if first else ("send_backward",), () if first else ("recv_forward",)
    for i in range(warmup):
        s.add("recv_forward", *to_previous[1])
        s.add("forward", "forward", microbatch=i, chunk=0)
        s.add("send_forward", *to_next[0])
    if steady:
        s.add("recv_forward", *to_previous[1])
    for i in range(steady):
        s.add("forward", "forward", microbatch=warmup + i, chunk=0)
        s.add("send_forward_recv_backward", *to_next[0], *to_next[1])
        s.add("backward", "backward", microbatch=i, chunk=0)
        if i == steady - 1:
            s.add("send_backward", *to_previous[0])
        else:
            s.add("send_backward_recv_forward", *to_previous[0], *to_previous[1])
    for i in range(warmup):
        s.add("recv_backward", *to_next[1])
        s.add("backward", "backward", microbatch=steady + i, chunk=0)
        s.add("send_backward", *to_previous[0])
    s.add("grad_sync", "grad_sync")
    return tuple(s.phases)


def interleaved(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> tuple[Phase, ...]:
    """The interleaved schedule without overlapped p2p (same paper, section 2.2), with Megatron's p2p calls.

    ``num_microbatches`` must be a multiple of ``num_stages``.
    """
    first, last = stage == 0, stage == num_stages - 1
    group = num_stages
    table = [
        (start + i, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for i in range(group)
    ]
    total = len(table)
    all_warmup = num_microbatches == num_stages
    warmup = total if all_warmup else min((num_stages - stage - 1) * 2 + (num_chunks - 1) * group, total)
    s = Schedule()

    def forward(k: int) -> None:
        microbatch, chunk = table[k]
        s.add("forward", "forward", microbatch=microbatch, chunk=chunk)

    def backward(k: int) -> None:
        microbatch, chunk = table[k]
        s.add("backward", "backward", microbatch=microbatch, chunk=num_chunks - 1 - chunk)

    def sends_forward(k: int) -> tuple[str, ...]:
        return () if last and table[k][1] == num_chunks - 1 else ("send_forward",)

    def sends_backward(k: int) -> tuple[str, ...]:
        return () if first and table[k][1] == num_chunks - 1 else ("send_backward",)

    def receives(k: int, leading: bool, name: str, stop: bool) -> tuple[str, ...]:
        if stop:
            return ()
        if leading:
            if k < num_stages - 1:
                return ()
            if table[k - (num_stages - 1)][1] == num_chunks - 1:
                return ()
        return (name,)

    s.add("recv_forward", *(() if first else ("recv_forward",)))
    for k in range(warmup):
        received = receives(k, first, "recv_forward", k == total - 1)
        forward(k)
        if k == warmup - 1 and not all_warmup:
            extra = () if last else ("recv_backward",)
            s.add("send_forward_backward_recv_forward_backward", *sends_forward(k), *received, *extra)
        else:
            s.add("send_forward_recv_forward", *sends_forward(k), *received)
    remaining = total - warmup
    for k in range(remaining):
        forward(k + warmup)
        backward(k)
        s.add(
            "send_forward_backward_recv_forward_backward",
            *sends_forward(k + warmup),
            *sends_backward(k),
            *receives(k + warmup, first, "recv_forward", k == remaining - 1),
            *receives(k, last, "recv_backward", False),
        )
    if all_warmup:
        s.add("recv_backward", *(() if last else ("recv_backward",)))
    for k in range(remaining, total):
        backward(k)
        s.add(
            "send_backward_recv_backward",
            *sends_backward(k),
            *receives(k, last, "recv_backward", k == total - 1),
        )
    s.add("grad_sync", "grad_sync")
    return tuple(s.phases)
