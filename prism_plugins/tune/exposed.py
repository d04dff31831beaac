"""What data-parallel communication adds to an iteration where it goes on beside compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Buckets(NamedTuple):
    """The gradients or parameters of a model chunk, as they are communicated."""

    ms: float
    """All of them one after the other."""
    number: int = 1
    held: float = 0.0
    """Share of the SMs that they hold (:mod:`prism_plugins.simulate.interference`)."""


NOTHING = Buckets(0.0)


def beside(buckets: Buckets, compute_ms: float) -> float:
    """What buckets that become ready evenly over ``compute_ms`` add to it; one bucket alone is ready at its end."""
    each, gap = buckets.ms / buckets.number, compute_ms / buckets.number
    exposed = each if each <= gap else buckets.ms - compute_ms + gap
    return exposed + (buckets.ms - exposed) * buckets.held


def after_backward(reductions: Sequence[Buckets], backward: Sequence[float], pp: int) -> float:
    """By how much the reduction of a stage's gradients outlasts its last backward step.

    Backward takes the chunks from the last to the first, ``pp`` micro-batches of one before the next, and a chunk's gradients
    are reduced in its last step.

    Args:
        reductions: By chunk.
        backward: Step of one micro-batch, by chunk, ms.
        pp: Pipeline stages.
    """
    free = float("-inf")
    ended = -pp * sum(backward[:-1]) if len(backward) > 1 else 0.0
    for c in reversed(range(len(reductions))):
        buckets = reductions[c]
        free = max(free + buckets.ms, ended + beside(buckets, backward[c]))
        ended += pp * backward[c - 1] if c else 0.0
    exposed = max(0.0, free)
    hidden = max(0.0, sum(r.ms for r in reductions) - exposed)
    return exposed + hidden * max((r.held for r in reductions[1:]), default=0.0)


def before_forward(
    gathered: Sequence[Buckets], forward: Sequence[float], arrives: Sequence[float], *, from_start: bool
) -> float:
    """By how much gathering parameters delays the first micro-batch on its way down the pipeline.

    Args:
        gathered: Of the first chunk of each stage.
        forward: Its step, ms.
        arrives: When the first micro-batch comes to a stage, ms.
        from_start: All stages begin with it when the iteration does (interleaved schedule); otherwise each when its first
            micro-batch has come.
    """
    late = [beside(g, f) if g.number > 1 else g.ms for g, f in zip(gathered, forward, strict=True)]
    if not from_start:
        return sum(late)
    return max(max(0.0, ms - at) for ms, at in zip(late, arrives, strict=True))
