"""``python -m prism_plugins.slice SPEC.json``: run the user's script as one rank of the target world.

The order matters: the virtual CUDA library is loaded before torch, torch is prepared before the script imports
it, integrations only register import hooks. Everything found is written to the slice's directory; the process
exits with status 0 and the report says how it went.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism_plugins.cache import make_manifest
from prism_plugins.errors import PrismError
from prism_plugins.integration import EndOfSlice, Integration
from prism_plugins.program.allocator_settings import conf_of, settings_from_environment
from prism_plugins.program.model import EventKind, Program
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import (
    HostFigures,
    JobFacts,
    ScriptFailure,
    SliceReport,
    SliceSpec,
)
from prism_plugins.rundir import SliceDir, read_json, write_json
from prism_plugins.script import raised_by_prism, run_script, script_traceback
from prism_plugins.slice_context import Context
from prism_plugins.unsupported import LIBRARIES, refuse_unsupported

if TYPE_CHECKING:
    from prism_plugins.capture.recorder import DeviceStats


ENOUGH_ITERATIONS = 2
"""A script that fails after so many is predicted: the first one makes optimizer states and fills caches."""


class Slice:
    """One slice's run."""

    def __init__(self, spec: SliceSpec) -> None:
        self.spec = spec
        self.dir = SliceDir(Path(spec.slice_dir))
        self.context: Context | None = None
        self.journal: Any = None
        self.integrations: list[Integration] = []
        self.report: SliceReport | None = None
        self._benchmark: Any = None
        self._dispatch_us: list[float] = []
        self._started = time.monotonic()

    def run(self) -> None:
        """Prepare the process, run the script, write what was found."""
        try:
            context = self._prepare()
            run_script(self.spec)
        except EndOfSlice:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0):
                how = f"with status {stop.code}" if isinstance(stop.code, int) else f"saying: {stop.code}"
                self._script_failed(f"it exited {how}", "")
        except PrismError as error:
            self._failed("user_error", str(error), "")
        except _OutOfMemory as error:
            from prism_plugins.gpu.device import out_of_memory

            self._failed("out_of_memory", out_of_memory(error, self.spec, self.context), "")
        except KeyboardInterrupt:
            self._failed("interrupted", "interrupted", "")
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            if raised_by_prism(error):
                self._failed("crashed", message, script_traceback(error))
            else:
                self._script_failed(message, script_traceback(error))
        else:
            context.script_ended()
        if self.report is None:
            self.save()

    def save(self, failure: ScriptFailure | None = None) -> None:
        """Write program, journal and report of a slice that came to its end (once). ``failure``: what ended the script after
        iterations that count."""
        if self.report is not None:
            return
        context = self.context
        assert context is not None
        if context.iteration is None:
            self._never_trained()
            return
        recorded, stats = context.iteration, context.iteration_stats
        from prism_plugins.program.store import save_program

        program = Program(
            rank=self.spec.rank,
            events=recorded.events,
            signatures=list(recorded.signatures),
            comms=list(recorded.comms),
            groups=list(recorded.groups),
            phases=list(recorded.phases),
            initial=list(recorded.initial),
        )
        save_program(program, self.dir.program)
        if self.journal is not None:
            self.journal.save(self.dir.journal)
        write_json(self.dir.manifest, make_manifest(context.files))
        if spec_on_gpu(self.spec) or self.spec.replay:
            self._save_measured(context)
        kinds = program.events["kind"]
        for line in (*device_assumptions(stats), *allocator_assumptions(os.environ)):
            context.assume(line)
        if context.period > 1:
            context.assume(
                f"iterations repeat every {context.period} steps (something is done in some of them only): the last one counts"
            )
        if not context.steady:
            context.assume(
                f"rank {self.spec.rank}: no two of {len(context.hashes)} iterations in a row were equal; the last one counts"
            )
        host = self._host_figures()
        self._write(
            SliceReport(
                rank=self.spec.rank,
                status="ok",
                host=host,
                steady=context.steady,
                num_ops=int((kinds == EventKind.KERNEL).sum()),
                num_comms=int((kinds == EventKind.COMM).sum()),
                record_ns_per_op=stats.record_ns_per_op,
                peak_allocated_bytes=stats.peak_allocated_bytes,
                peak_requested_bytes=stats.peak_requested_bytes,
                peak_reserved_bytes=stats.peak_reserved_bytes,
                allocated_bytes_end=stats.allocated_bytes,
                late_peak_active_bytes=stats.late_peak_active_bytes,
                late_peak_reserved_bytes=stats.late_peak_reserved_bytes,
                allocator_conf=conf_of(os.environ),
                startup=context.recorder.startup.result(recorded.groups),
                groups_outside=context.recorder.groups_outside(),
                timers=timers_of_events(context.iteration_timers, recorded.events),
                gradient_buckets=tuple(context.iteration_buckets),
                host_pageable_bytes=stats.host.pageable_peak,
                host_pinned_bytes=stats.host.page_locked,
                host_peak_bytes=stats.host.total_peak,
                untouched_bytes=stats.host.untouched_peak,
                synthesized_reads=sum(stats.synthesized_reads.values()),
                failure=failure,
            )
        )

    def use_facts(self, facts: JobFacts) -> None:
        """Let the journal name pipeline stages."""
        if self.journal is not None:
            self.journal.journal.layout = facts.layout

    def save_journal(self) -> None:
        """Let slices that need this one's control payloads start while it goes on."""
        # Writing takes time between iterations that are timed.
        timed = spec_on_gpu(self.spec) and self.context is not None and self.context.recorder.warmed_up
        if self.journal is not None and not timed:
            self.journal.journal.save(self.dir.journal)

    def after_iteration(self) -> None:
        """An iteration was recorded: publish the journal, and see how fast the machine is just now."""
        self.save_journal()
        if self._tells_host_speed:
            from prism_plugins.host_benchmark import AFTER_ITERATION_S, DispatchBenchmark

            self._benchmark = self._benchmark or DispatchBenchmark()
            self._dispatch_us.append(self._benchmark.measure_us(budget_s=AFTER_ITERATION_S))

    def _prepare(self) -> Context:
        spec = self.spec
        prepare = self._prepare_gpu if spec_on_gpu(spec) else self._prepare_virtual
        context = self.context = prepare()
        self.integrations = load_integrations()
        for integration in self.integrations:
            integration.install(context)
        refuse_unsupported(context, {i.name for i in self.integrations})
        return context

    def _prepare_virtual(self) -> Context:
        spec = self.spec
        from prism_plugins.device.load import install_torch_cuda, load_device

        load_device(spec)
        import torch  # noqa: F401  (from here on the virtual device is torch's CUDA)

        from prism_plugins.capture.recorder import get_recorder, use_recorder

        if spec.replay:
            from prism_plugins.replay.clocked import ClockedRecorder

            use_recorder(ClockedRecorder.of_plan(Path(spec.replay), iterations=spec.iterations))
        context = self._new_context(get_recorder())
        install_torch_cuda(context)
        from prism_plugins.collectives.install import install_collectives

        self.journal = install_collectives(spec, context)
        from prism_plugins.device.regions import install_regions

        install_regions(context)
        if spec.replay:
            context.recorder.clock.install(context)
        return context

    def _prepare_gpu(self) -> Context:
        """Nothing of the virtual device is loaded; torch, compiled regions and kernels are the real ones."""
        spec = self.spec
        import torch

        global _OutOfMemory
        _OutOfMemory = torch.OutOfMemoryError
        from prism_plugins.capture.recorder import use_recorder
        from prism_plugins.gpu.device import neighbours, prepare_gpu

        sensors, context_bytes = prepare_gpu(spec)
        if spec.replay:
            from prism_plugins.replay.participants import ReplayRecorder

            recorder: Any = ReplayRecorder.of_plan(Path(spec.replay), iterations=spec.iterations)
        else:
            from prism_plugins.gpu.recorder import GpuRecorder
            from prism_plugins.gpu.timing import make_schedule

            recorder = GpuRecorder(make_schedule(spec.iterations), work_dir=self.dir.path, sensors=sensors)
            recorder.memory = type(recorder.memory)(context=context_bytes)
        use_recorder(recorder)
        context = self._new_context(recorder)
        context.findings += neighbours(sensors)
        from prism_plugins.collectives.install import install_collectives

        self.journal = install_collectives(spec, context)
        self.journal.journal.reads_gpu = lambda: recorder.reads_values
        return context

    def _new_context(self, recorder: Any) -> Context:
        return Context(
            self.spec,
            recorder,
            on_facts=self.use_facts,
            on_iteration=self.after_iteration,
            on_end=self.save,
        )

    def _save_measured(self, context: Context) -> None:
        """What a slice on a real GPU measured, or a replay saw."""
        recorder = context.recorder
        if self.spec.replay:
            write_json(self.dir.replay, recorder.result())
            return
        if not recorder.has_program:
            raise PrismError(
                f"the script trained {len(context.hashes)} iterations only; a slice on cuda needs {self.spec.iterations}: "
                "let it train longer, or lower --prism-iterations (at least 5)"
            )
        write_json(self.dir.measured, recorder.measured(self.spec.rank))
        for line in recorder.remarks:
            context.assume(line)

    @property
    def _tells_host_speed(self) -> bool:
        """Elsewhere CPU time is kernels, or waiting for peers, as well; a replay tells nothing that slices did not."""
        return self.spec.device == "virtual" and not self.spec.real_ranks and not self.spec.replay

    def _host_figures(self) -> HostFigures | None:
        """How fast this machine is, beside the CPU times of the iterations."""
        if not self._tells_host_speed:
            return None
        from prism_plugins.host_benchmark import figures_of_training

        return figures_of_training(self._dispatch_us)

    def _never_trained(self) -> None:
        supported = ", ".join(i.name for i in self.integrations if i.name not in LIBRARIES) or "none"
        self._failed(
            "never_trained",
            "the script ended without a training iteration that prism recognises "
            f"(frameworks it knows: {supported})"
            + (f": {self.context.why_not_trained}" if self.context and self.context.why_not_trained else ""),
            "",
        )

    def _script_failed(self, message: str, trace: str) -> None:
        """The script's own error: the slice failed, or has ended if there are iterations to predict from."""
        context = self.context
        is_alone = not self.spec.real_ranks and not self.spec.replay
        if (
            context is None
            or not is_alone
            or len(context.hashes) < ENOUGH_ITERATIONS
            or not context.recorder.has_program
        ):
            self._failed("script_failed", message, trace)
            return
        failure = ScriptFailure(message=message, traceback=trace, phase=context.phase_text)
        context.drop_iteration()
        context.finding(
            Finding(
                kind="script_failed",
                severity="error",
                ranks=str(self.spec.rank),
                phase=failure.phase,
                message=f"the script failed: {message}; predicted is the last of the {len(context.hashes)} iterations before",
            )
        )
        self.save(failure)

    def _failed(self, status: str, message: str, trace: str) -> None:
        if self.report is not None:
            return
        phase = self.context.phase_text if self.context is not None else "while the slice was prepared"
        self._write(
            SliceReport(rank=self.spec.rank, status=status, message=message, traceback=trace, phase=phase)
        )

    def _write(self, report: SliceReport) -> None:
        import resource

        context = self.context
        if context is not None:
            report.facts = context.facts
            report.seconds_per_iteration = tuple(context.seconds)
            report.cpu_seconds_per_iteration = tuple(context.cpu_seconds)
            report.iteration_hashes = tuple(context.hashes)
            report.script_ended = context.ended
            report.assumptions = tuple(context.assumptions)
            report.findings = tuple(context.findings)
            report.log_lines = tuple(context.log_lines)
        report.seconds = time.monotonic() - self._started
        report.max_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.report = report
        write_json(self.dir.report, report)


class _NeverRaised(BaseException):
    pass


_OutOfMemory: type[BaseException] = _NeverRaised
"""torch's exception, once torch is there."""


def spec_on_gpu(spec: SliceSpec) -> bool:
    """Whether a slice runs on a real GPU."""
    return spec.device == "cuda"


def timers_of_events(
    timers: Iterable[tuple[str, int, int]], events: np.ndarray
) -> tuple[tuple[str, int, int], ...]:
    """Timers by the ordinals of their EVENT_RECORDs in the iteration; those that began before it are left out."""
    ids = events["ref"][events["kind"] == EventKind.EVENT_RECORD].tolist()
    ordinal = {number: i for i, number in enumerate(ids)}
    return tuple(
        (name, ordinal[begin], ordinal[end])
        for name, begin, end in timers
        if begin in ordinal and end in ordinal
    )


def load_integrations() -> list[Integration]:
    """Every integration found by entry point, in name order."""
    points = importlib.metadata.entry_points(group="prism_plugins.integrations")
    return [point.load()() for point in sorted(points, key=lambda p: p.name)]


def allocator_assumptions(environment: Mapping[str, str]) -> list[str]:
    """What the ledger does not follow of the allocator's settings, one line."""
    unknown = settings_from_environment(environment).unknown
    return (
        [f"PYTORCH_ALLOC_CONF: {', '.join(unknown)} not followed; memory is the default's"] if unknown else []
    )


def device_assumptions(stats: DeviceStats) -> list[str]:
    """What the virtual device could not do for real, one line each."""
    lines = []
    for names, text in (
        (stats.no_cpu_kernel, "have no CPU kernel: their small results were synthesized"),
        (stats.no_meta_kernel, "have no shape function: taken as keeping the shapes of what they change"),
        (stats.dropped, "reached the CUDA runtime past torch's operators: neither recorded nor carried out"),
    ):
        if names:
            lines.append(f"{', '.join(sorted(names))} {text}")
    return lines


def end_with_parent() -> None:
    """Have the kernel end this process when the conductor is killed outright (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


def run_child(piece: Slice) -> None:
    """Run a slice as all that this process does. Does not return when its report cannot be written."""
    try:
        piece.run()
    except PrismError as error:
        # The report itself could not be written (full disk): the conductor has only this line.
        print(f"prism: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def main() -> None:
    """Entry point of the child process; never returns."""
    end_with_parent()
    faulthandler.enable(all_threads=False)  # a crash in compiled code says where in the script it was
    spec = read_json(Path(sys.argv[1]), SliceSpec)
    piece = Slice(spec)
    run_child(piece)
    if spec.real_ranks and piece.report is not None and piece.report.status == "ok":
        from prism_plugins.physical import meet_at_end

        meet_at_end(spec)
    # Frameworks leave threads, stores and exit handlers behind that wait for peers which do not exist.
    os._exit(0)


if __name__ == "__main__":
    main()
