"""What was read of a real run, whatever it was read from."""

from __future__ import annotations

import msgspec

MAX_FILE_BYTES = 4 << 30
"""Of one file, uncompressed: more is no trace of a few steps."""


class OpKey(msgspec.Struct, frozen=True, order=True):
    """What makes two ops the same in a comparison."""

    name: str
    """Without overload: ``aten::mm``; ``send``, ``all_reduce``, … for communication."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensor inputs; empty where they are not known. Communication: ((elements,),)."""
    group: str = ""
    """Communication: description of the process group."""


class OpTotal(msgspec.Struct, frozen=True, kw_only=True):
    """An op in one iteration of one rank."""

    calls: float
    ms: float
    """Device time."""


class RealRank(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did in a mean iteration."""

    rank: int
    iterations: int
    iteration_ms: float
    """Under the profiler, which slows the host; 0 when unknown."""
    ops: dict[tuple[OpKey, ...], OpTotal] = {}
    """By the op that launched the kernel and the ops around it, innermost first: a program may name either."""
    phase_ms: dict[str, float] = {}
    """Device time of kernels by where they were launched: ``forward``, ``backward``, ``optimizer``."""
    gpu: str = ""
    collectives_ms: dict[tuple[OpKey, str], list[float]] = {}
    """Durations of every call in order, by op and the ranks of its group as the trace writes them."""
    transfer_ms: dict[str, float] = {}
    """By group, of one iteration: time from the arrival of the last member, where the traces of several members tell it."""


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring. What a source does not tell is empty."""

    source: str
    """What was read, for the report."""
    iteration_ms: float = 0.0
    """Median of the steady iterations."""
    iterations: int = 0
    ranks: tuple[RealRank, ...] = ()
    timers_ms: dict[str, float] = {}
    """The framework's own timers, median over iterations."""
    samples_per_s: float = 0.0
    peak_allocated_bytes: dict[int, int] = {}
    """By rank."""
    peak_reserved_bytes: dict[int, int] = {}
    has_durations: bool = True
    """False: the source tells which calls there were, not how long they took."""
