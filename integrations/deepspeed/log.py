"""DeepSpeed's log: caught as it is printed, and written again at target scale.

Times come from the simulated timeline: DeepSpeed's timers record CUDA events, which are part of a rank's program, so
each timer's span is read off the predicted times (``Prediction.timers_ms``). Rewritten are the lines of
``wall_clock_breakdown``, the throughput lines, the pipeline's ``steps:`` lines, the tables of the communication logger
and the flops profiler, ``see_memory_usage`` and the dictionaries that Hugging Face's Trainer prints. Memory is that of
the virtual device, which is the target's. What training would compute is marked ``*``; what is not predicted says so.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.integration.hook_table import Hook
from prism_plugins.integration.log_lines import (
    NOT_PREDICTED,
    SYNTHESIZED_MARK,
    PredictedClock,
    holds_rank,
    tap_stdout,
)
from prism_plugins.integrations.deepspeed.log_flops import FlopsProfile
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.prediction import Prediction

TIMERS = re.compile(r"\btime \(ms\) \|")
TIMER = re.compile(r"([\w./-]+): (\d+\.\d+)")
THROUGHPUT = re.compile(r"\bglobal_step=(\d+), RunningAvgSamplesPerSec=")
PIPELINE_STEP = re.compile(r"^steps: (\d+) loss: .*iter time \(s\): ")
PROGRESS = re.compile(r"\bstep=(\d+), skipped=\d+, lr=")
MEMORY = re.compile(r"\bMA [\d.]+ GB\s+Max_MA [\d.]+ GB")
HOST_MEMORY = re.compile(r"\bCPU Virtual Memory:\s+used = ")
COMMS_HEADER = re.compile(r"^Comm\. Op\s+Message Size\s+Count")
COMMS_OP = re.compile(r"^[\w|.:\[\] -]+$")
FLOPS_BEGIN = re.compile(r"^-{10,} DeepSpeed Flops Profiler -{10,}$")
RULE = re.compile(r"^-{60,}$")
TRAINER = re.compile(r"\{'(?:loss|eval_loss|train_runtime)': .*\}")
_TRAINER_EXACT = ("learning_rate", "epoch", "num_input_tokens_seen", "step")
_COMMS_PREFIX = "comm:"


# --- in a slice ---


def tap_log(context: SliceContext) -> None:
    """Report the log lines that the script prints, whatever prints them; the output itself is unchanged."""
    collect = Collector(context)
    tap_stdout(context, collect)


class Collector:
    """Tells the context which of the lines printed are DeepSpeed's log; tables are kept together."""

    def __init__(self, context: SliceContext) -> None:
        self._report = context.log_line
        self._previous = ""
        self._table: re.Pattern[str] | None = None

    def __call__(self, line: str) -> bool:
        """Whether the line is part of the log."""
        previous, self._previous = self._previous, line
        if self._table is RULE:
            if RULE.match(line):
                self._table = None
            return True
        if self._table is COMMS_HEADER:
            if line.startswith(" ") or (COMMS_OP.match(line) and ":" not in line and " " not in line.strip()):
                return True
            self._table = None
        if FLOPS_BEGIN.match(line):
            self._table = RULE
            return True
        if COMMS_HEADER.match(line):
            self._table = COMMS_HEADER
            return True
        if MEMORY.search(line):
            self._report(previous.rstrip())  # What the memory is that of.
            return True
        return any(
            p.search(line) for p in (TIMERS, THROUGHPUT, PIPELINE_STEP, PROGRESS, HOST_MEMORY, TRAINER)
        )


def _timer_stop(session: Session, original: Any, module: ModuleType) -> Any:
    """Every span that a timer of DeepSpeed measures, by the CUDA events it recorded."""

    from prism_plugins.device.streams import record_id

    @functools.wraps(original)
    def stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not self.use_host_timer:
            span = self.event_timers[-1]
            session.timer_stopped(self.name_, record_id(span.start_event), record_id(span.end_event))
        return result

    return stop


def _comms_append(session: Session, original: Any, module: ModuleType) -> Any:
    """The communication logger sums by operation and message size: its spans are told apart by both."""

    @functools.wraps(original)
    def append(self: Any, raw_name: str, record_name: str, latency: float, msg_size: int) -> Any:
        session.timed_call(comms_timer(record_name, module.convert_size(msg_size)))
        return original(self, raw_name, record_name, latency, msg_size)

    return append


def comms_timer(record_name: str, size: str) -> str:
    """Name of the spans behind one row of the communication logger's table. ``size`` as the table shows it."""
    return f"{_COMMS_PREFIX}{record_name}:{size}"


def _output_file(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def flops_profiler_output_file(self: Any) -> None:
        if original(self):
            session.context.assume("the flops profile is printed, not written to its output_file")

    return flops_profiler_output_file


HOOKS = (
    Hook(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.flops_profiler_output_file",
        _output_file,
        "emulated profiles replace no file",
    ),
    Hook(
        "deepspeed.utils.timer", "SynchronizedWallClockTimer.Timer.stop", _timer_stop, "what timers measure"
    ),
    Hook("deepspeed.utils.comms_logging", "CommsLogger.append", _comms_append, "what timers measure"),
)


# --- in the conductor ---


def rewrite_lines(lines: Sequence[str], prediction: Prediction) -> list[str]:
    """The lines as the target job would print them. A line of unknown form is kept as it is."""
    return _Rewriter(prediction).rewrite(lines)


class _Rewriter:
    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._clock = PredictedClock(prediction.iteration_time_ms)
        self._used: Counter[str] = Counter()
        self._comms_op = ""
        self._stragglers = False

    def rewrite(self, lines: Sequence[str]) -> list[str]:
        rewritten: list[str] = []
        profile: FlopsProfile | None = None
        in_comms = False
        for line in lines:
            if FLOPS_BEGIN.match(line):
                profile = FlopsProfile(self._prediction.timers_ms, microbatch=self._used["profile"])
                self._used["profile"] += 1
            if profile is not None:
                rewritten.append(profile.line(line))
                if RULE.match(line):
                    profile = None
                continue
            in_comms = bool(COMMS_HEADER.match(line)) or (in_comms and bool(COMMS_OP.match(line)))
            rewritten.append(self._comms_line(line) if in_comms else self._line(line))
        return rewritten

    def _line(self, line: str) -> str:
        if TIMERS.search(line):
            return TIMER.sub(self._timer, line)
        if found := THROUGHPUT.search(line):
            return self._clock.stamp(self._throughput_line(line), int(found.group(1)))
        if found := PROGRESS.search(line):
            return self._clock.stamp(line, int(found.group(1)))
        if PIPELINE_STEP.search(line):
            return self._pipeline_line(line)
        if HOST_MEMORY.search(line):
            return re.sub(r"used = .*", f"used = {NOT_PREDICTED}", line)
        if found := TRAINER.search(line):
            return _trainer_line(found.group(0))
        return line

    def _timer(self, found: re.Match[str]) -> str:
        name = found.group(1)
        spans = self._prediction.timers_ms.get(name, ())
        if not spans:
            return f"{name}: {NOT_PREDICTED}"
        if not name.endswith("_microstep"):
            # Printed once per iteration: the sum over its micro-batches.
            return f"{name}: {sum(spans):.2f}"
        value = spans[self._used[name] % len(spans)]
        self._used[name] += 1
        return f"{name}: {value:.2f}"

    def _throughput_line(self, line: str) -> str:
        rate = self._prediction.samples_per_s
        line = re.sub(
            r"(SamplesPerSec)=[^,\s]+",
            lambda m: f"{m.group(1)}={NOT_PREDICTED if rate is None else f'{rate:.3f}'}",
            line,
        )
        rank = self._prediction.logging_rank
        memory = next((m for m in self._prediction.memory if holds_rank(m.ranks, rank)), None)
        if memory is None:
            return line
        line = re.sub(
            r"MaxMemAllocated=[\d.]+GB", f"MaxMemAllocated={memory.peak_allocated_bytes / 2**30:.2f}GB", line
        )
        return re.sub(
            r"\bMemAllocated=[\d.]+GB", f"MemAllocated={memory.allocated_bytes_end / 2**30:.2f}GB", line
        )

    def _pipeline_line(self, line: str) -> str:
        line = re.sub(
            r"(\w+: )(-?[\d.]+|nan|inf)(?= (?:\w+: |iter time))", self._synthesized_unless_steps, line
        )
        seconds, rate = self._prediction.iteration_time_ms / 1e3, self._prediction.samples_per_s
        line = re.sub(
            r"iter time \(s\): \S+", f"iter time (s): {f'{seconds:.3f}' if seconds else NOT_PREDICTED}", line
        )
        return re.sub(
            r"samples/sec: \S+", f"samples/sec: {NOT_PREDICTED if rate is None else f'{rate:.3f}'}", line
        )

    @staticmethod
    def _synthesized_unless_steps(found: re.Match[str]) -> str:
        return found.group(0) + ("" if found.group(1) == "steps: " else SYNTHESIZED_MARK)

    def _comms_line(self, line: str) -> str:
        """A row: operation on a line of its own, then size, count, total and average latency (ms), algorithm and bus
        bandwidth (Gbps) in columns of 20 characters."""
        if COMMS_HEADER.match(line):
            self._stragglers = "straggler" in line
            return line
        if not line.startswith(" "):
            self._comms_op = line.strip()
            return line
        size, count, *rest = (line[i : i + 20].strip() for i in range(20, len(line), 20))
        spans = self._prediction.timers_ms.get(comms_timer(self._comms_op, size), ())
        mean = sum(spans) / len(spans) if spans else 0.0
        if not mean or self._stragglers:
            values = [NOT_PREDICTED] * len(rest)
        else:
            rates = bandwidths(self._comms_op, size, mean, self._prediction.world_size)
            values = [f"{value:.2f}" for value in (mean * int(count), mean, *rates)]
        return line[:20] + "".join(f"{text:<20}" for text in (size, count, *values))


def bandwidths(op: str, size: str, milliseconds: float, world_size: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in Gbps as ``deepspeed.utils.comms_logging.calc_bw_log`` defines them."""
    number, _, unit = size.partition(" ") if " " in size else (size.removesuffix("B"), "", "B")
    nbytes = float(number) * 1024 ** ("B", "KB", "MB", "GB", "TB").index(unit)
    rate = nbytes / milliseconds * 8 / 1e6
    wire = (world_size - 1) / world_size
    op = op.partition(" ")[0]
    if op.startswith("all_to_all"):
        return rate, rate * wire
    if op.startswith(("all_gather", "reduce_scatter")):
        return rate * world_size, rate * world_size * wire
    if op.startswith(("all_reduce", "inference_all_reduce")):
        return 2 * rate, 2 * rate * wire
    return rate, rate


def _trainer_line(text: str) -> str:
    """Trainer's dictionary: losses and norms marked, evaluation and whole-run times not predicted."""
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    shown = []
    for key, value in values.items():
        if key.endswith(("_runtime", "_per_second")) or key == "total_flos":
            value = NOT_PREDICTED
        elif key not in _TRAINER_EXACT:
            value = f"{value}{SYNTHESIZED_MARK}"
        shown.append(f"{key!r}: {str(value)!r}")
    return "{" + ", ".join(shown) + "}"
