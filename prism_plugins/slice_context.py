"""The slice's side of :class:`prism_plugins.integration.SliceContext`: phases, iterations, patches, facts.

Iterations are recorded one at a time. Two in a row (of those that begin alike) whose device events hash equal are
steady, and so are iterations that repeat with a period (a log line every other step): the last one is the program, and
the slice ends when the next iteration would begin (so that the log line of the steady one is still printed).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from prism_plugins.import_hooks import ImportHooks
from prism_plugins.integration import EndOfSlice
from prism_plugins.program.model import MemoryCategory, Phase
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import JobFacts, SliceSpec
from prism_plugins.rundir import write_json
from prism_plugins.steadiness import iteration_hash, period_of


class Patch(NamedTuple):
    """One replaced attribute."""

    target: Any
    name: str
    original: Any
    replacement: Any
    why: str


class Context:
    """See the module docstring. One per slice; called from the script's main thread."""

    def __init__(
        self,
        spec: SliceSpec,
        recorder: Any,
        *,
        on_facts: Callable[[JobFacts], None] = lambda facts: None,
        on_iteration: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_facts`` is called when the layout is known, ``on_iteration`` is called after each recorded iteration, ``on_end`` when enough was seen."""
        self.spec = spec
        self.recorder = recorder
        self.facts: JobFacts | None = None
        self.phase: Phase | None = None
        self.assumptions: list[str] = []
        self.findings: list[Finding] = []
        self.files: list[Path] = []
        self.why_not_trained = ""
        self.iteration_timers: list[tuple[str, int, int]] = []
        """Of the last recorded iteration; event ids."""
        self._timers: list[tuple[str, int, int]] = []
        self.iteration_buckets: list[tuple[int, ...]] = []
        """Of the last recorded iteration."""
        self._buckets: list[tuple[int, ...]] = []
        self.log_lines: list[str] = []
        self.patches: list[Patch] = []
        self.iteration: Any = None
        """The last recorded iteration (capture's RecordedIteration)."""
        self.iteration_stats: Any = None
        self.hashes: list[str] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.period = 0
        """Iterations after which what they do repeats; 0 as long as it does not."""
        self.ended = False
        """The script came to its end by itself."""
        self._began: float | None = None
        self._began_cpu = 0.0
        self._ends_by_next = False
        self._digests: dict[bool, list[str]] = {True: [], False: []}
        self._continues = False
        """The iteration began where the one before ended, with what the script does in between. One that follows an
        evaluation begins later: it is compared with others of its kind only."""
        self._tentative = False
        """An iteration was begun by :meth:`next_iteration`, and nothing says yet that the script trains on."""
        self._hooks = ImportHooks()
        self._hooks.install()
        self._on_facts = on_facts
        self._on_iteration = on_iteration
        self._on_end = on_end

    # --- what integrations call ---

    def on_import(self, module: str, hook: Callable[[ModuleType], None]) -> None:
        """Call ``hook(module)`` right after the module was imported (now, if it already is)."""
        self._hooks.add(module, hook)

    def patch(self, target: Any, name: str, replacement: Any, *, why: str) -> Any:
        """Replace an attribute, remember it, and return the original.

        Raises AttributeError when ``target`` has no such attribute: upstream renamed it.
        """
        original = getattr(target, name)
        # The raw entry, so that undoing restores a static or class method as it was.
        raw = vars(target).get(name, original) if hasattr(target, "__dict__") else original
        setattr(target, name, replacement)
        self.patches.append(Patch(target, name, raw, replacement, why))
        return original

    def undo_patches(self) -> None:
        """Restore everything :meth:`patch` replaced, last first, and take the import hooks out."""
        while self.patches:
            patch = self.patches.pop()
            setattr(patch.target, patch.name, patch.original)
        self._hooks.remove()

    def set_facts(self, facts: JobFacts) -> None:
        """Report the layout and the stages; written to disk at once for the conductor."""
        facts.layout.validate()
        self.facts = facts
        self._on_facts(facts)
        write_json(Path(self.spec.slice_dir) / "facts.json", facts)

    def begin_phase(self, phase: Phase) -> None:
        """Open a phase; closes the one that is open."""
        self.end_phase()
        self.phase = phase
        self.recorder.begin_phase(phase)

    def end_phase(self) -> None:
        """Close the open phase, if any."""
        if self.phase is not None:
            self.phase = None
            self.recorder.end_phase()

    def begin_iteration(self, *, ends_by_next: bool = False) -> None:
        """A training iteration starts; raises :class:`EndOfSlice` when enough was seen."""
        if self._began is not None:
            self.end_iteration()
        self.stop_if_enough()
        self._start(continues=False)
        self._ends_by_next = ends_by_next

    def next_iteration(self) -> None:
        """A training iteration ended and the next one starts, if the script goes on to train."""
        self.end_iteration()
        self._start(continues=True)
        self._ends_by_next = True
        self._tentative = True

    def stop_if_enough(self) -> None:
        """The script trains (on); raises :class:`EndOfSlice` when enough was seen."""
        self._tentative = False
        # Ranks that run for real and exchange messages must all stop after the same iteration.
        settled = self.steady and self.recorder.has_program and not self.spec.real_ranks
        if settled or len(self.hashes) >= self.spec.iterations:
            self._end()

    def drop_iteration(self) -> None:
        """What was recorded since the iteration began is no part of training (an evaluation, a checkpoint)."""
        if self._began is not None:
            self.end_phase()
            self.recorder.stop()
            self._began = None

    def _start(self, *, continues: bool) -> None:
        self._continues = continues
        self._timers.clear()
        self._buckets.clear()
        self.recorder.reset_peaks()
        self.recorder.start()
        self._began = time.monotonic()
        self._began_cpu = time.process_time()

    def end_iteration(self) -> None:
        """A training iteration ended."""
        if self._tentative:
            self._tentative = False
            self.drop_iteration()
        if self._began is None:
            return
        self.end_phase()
        self.seconds.append(time.monotonic() - self._began)
        self.cpu_seconds.append(time.process_time() - self._began_cpu)
        self._began = None
        self.iteration = self.recorder.stop()
        self.iteration_timers = list(self._timers)
        self.iteration_buckets = list(self._buckets)
        self.iteration_stats = self.recorder.stats()
        digest = iteration_hash(self.iteration.events)
        alike = self._digests[self._continues]
        alike.append(digest)
        self.period = period_of(alike)
        self.hashes.append(digest)
        self._on_iteration()

    def script_ended(self) -> None:
        """The script came to its end; an iteration that is open counts if nothing else would end it."""
        self.ended = True
        if self._ends_by_next:
            self.drop_iteration()
        self.end_iteration()

    def tag(self, tensor: Any, category: MemoryCategory) -> None:
        """Say what the storage behind a tensor is for."""
        self.recorder.tag(tensor, category)

    def assume(self, text: str) -> None:
        """Add a line to the assumptions (once)."""
        if text not in self.assumptions:
            self.assumptions.append(text)

    def finding(self, finding: Finding) -> None:
        """Report something the user should know before booking the cluster (once)."""
        if finding not in self.findings:
            self.findings.append(finding)

    def depends_on(self, path: Path) -> None:
        """The script reads a file that its command line does not name."""
        self.files.append(path)

    def not_trained_yet(self, why: str) -> None:
        """What keeps the script from training so far."""
        self.why_not_trained = why

    def timer(self, name: str, begin: int, end: int) -> None:
        """One of the framework's own timers measured the time between two recorded CUDA events."""
        self._timers.append((name, begin, end))

    def gradient_bucket(self, parameters: Sequence[int]) -> None:
        """The gradients of these parameters are reduced together."""
        self._buckets.append(tuple(parameters))

    def log_line(self, text: str) -> None:
        """Report one of the framework's own per-iteration log lines, as printed."""
        self.log_lines.append(text)

    # --- what slice.py reads ---

    @property
    def steady(self) -> bool:
        """Enough iterations were seen."""
        return self.period > 0

    @property
    def phase_text(self) -> str:
        """Where the slice is, for people: ``iteration 2, forward of micro-batch 3``."""
        if self._began is None:
            return f"after iteration {len(self.hashes)}" if self.hashes else "before the first iteration"
        where = f"iteration {len(self.hashes) + 1}"
        if self.phase is None:
            return where
        text = f"{where}, {self.phase.kind}"
        if self.phase.microbatch >= 0:
            text += f" of micro-batch {self.phase.microbatch}"
        if self.phase.chunk > 0:
            text += f", chunk {self.phase.chunk}"
        return text

    def _end(self) -> None:
        # What the slice found is saved before the stack unwinds: a script's finally blocks cannot lose it.
        self._on_end()
        if threading.current_thread() is not threading.main_thread():
            os._exit(0)
        raise EndOfSlice


def describe(facts: JobFacts) -> str:
    """The layout in one line, non-trivial dimensions only."""
    layout = msgspec.structs.asdict(facts.layout)
    sizes = [
        f"{name}{layout[name]}" for name in ("tp", "cp", "ep", "etp", "pp", "vpp", "dp") if layout[name] > 1
    ]
    return (
        f"{facts.framework} {' '.join(sizes) or 'single rank'}, {facts.layout.num_microbatches} micro-batches"
    )
