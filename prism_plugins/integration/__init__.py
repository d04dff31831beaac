"""The protocol a framework integration implements, and what it is handed inside a slice.

Integrations are found by entry point ``prism_plugins.integrations``. They run inside the slice's process, hook
the framework when it is imported, and report through :class:`SliceContext`. The only method called elsewhere
is :meth:`Integration.rewrite_log`, in the conductor, which must not import the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from prism_plugins.program.model import MemoryCategory, Phase
from prism_plugins.program.prediction import Finding, Prediction
from prism_plugins.program.slices import JobFacts, SliceSpec


class SliceContext(Protocol):
    """What the core offers to an integration inside a slice."""

    spec: SliceSpec
    facts: JobFacts | None
    """What :meth:`set_facts` reported last."""

    def on_import(self, module: str, hook: Callable[[ModuleType], None]) -> None:
        """Call ``hook(module)`` right after the module was imported (now, if it already is)."""
        ...

    def patch(self, target: Any, name: str, replacement: Any, *, why: str) -> Any:
        """Replace an attribute, remember it in the patch table, and return the original."""
        ...

    def set_facts(self, facts: JobFacts) -> None:
        """Report the layout and the stages, before the first iteration. Written to disk at once, so that the
        conductor can plan further slices while this one goes on. What is learnt later may be added by reporting
        again; the plan stays."""
        ...

    def begin_phase(self, phase: Phase) -> None:
        """Open a phase; closes the one that is open."""
        ...

    def end_phase(self) -> None:
        """Close the open phase, if any."""
        ...

    def begin_iteration(self, *, ends_by_next: bool = False) -> None:
        """A training iteration starts. With ``ends_by_next`` it counts only once :meth:`next_iteration` is called: a
        script that ends before leaves an unfinished one, which is dropped."""
        ...

    def end_iteration(self) -> None:
        """A training iteration ended. May raise :class:`EndOfSlice` once enough was seen."""
        ...

    def next_iteration(self) -> None:
        """A training iteration ended and the next one starts here, if the script goes on to train. Never raises:
        what the script prints about the ended one is still printed."""
        ...

    def stop_if_enough(self) -> None:
        """The script trains on after :meth:`next_iteration`. May raise :class:`EndOfSlice`."""
        ...

    def drop_iteration(self) -> None:
        """What was recorded since the iteration began is no part of training (an evaluation, a checkpoint)."""
        ...

    def tag(self, tensor: Any, category: MemoryCategory) -> None:
        """Say what the storage behind a tensor is for."""
        ...

    def assume(self, text: str) -> None:
        """Add a line to the assumptions (once)."""
        ...

    def finding(self, finding: Finding) -> None:
        """Report something the user should know before booking the cluster (once). ``ranks`` empty: the whole job;
        equal findings of several slices become one, with the ranks of all."""
        ...

    def depends_on(self, path: Path) -> None:
        """The script reads a file that its command line does not name; a slice is run again when it changed."""
        ...

    def not_trained_yet(self, why: str) -> None:
        """What keeps the script from training so far: told if it ends without an iteration. The last one counts."""
        ...

    def timer(self, name: str, begin: int, end: int) -> None:
        """One of the framework's own timers measured the time between two recorded CUDA events (their ids) of the
        iteration. The prediction tells what it would show at target scale."""
        ...

    def gradient_bucket(self, parameters: Sequence[int]) -> None:
        """The gradients of these parameters (numbered as in :class:`.slices.FlatPartitions`) are about to be reduced
        together, in this order."""
        ...

    def log_line(self, text: str) -> None:
        """Report one of the framework's own per-iteration log lines, as printed."""
        ...


class EndOfSlice(BaseException):
    """Raised out of the training loop when the slice has seen enough. Not an Exception: scripts catch those."""


class Integration(Protocol):
    """One framework."""

    name: str

    def install(self, context: SliceContext) -> None:
        """Register import hooks. Called in the slice before the script runs; must not import the framework."""
        ...

    def rewrite_log(self, lines: Sequence[str], prediction: Prediction) -> list[str]:
        """The framework's own log lines at target scale."""
        ...
