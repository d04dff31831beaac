"""Megatron's log lines at target scale."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from prism_plugins.integration.log_lines import LogTap
from prism_plugins.integrations.megatron import MegatronIntegration
from prism_plugins.integrations.megatron.log import is_log_line, rewrite_lines
from prism_plugins.program.prediction import Audit, Breakdown, ClassMemory, Prediction

ITERATION = (
    " [2026-01-02 03:04:05.000000] iteration        {n}/      50 | consumed samples:           16 | "
    "elapsed time per iteration (ms): 7154.7 | throughput per GPU (TFLOP/s/GPU): 3.1 | "
    "learning rate: 5.000000E-05 | global batch size:    16 | lm loss: 1.083221E+01 | loss scale: 1.0 | "
    "grad norm: 2.719 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
MEMORY = (
    "[Rank 16] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.00"
    " | max reserved: 4.00"
)


def prediction(**given) -> Prediction:
    memory = ClassMemory(
        ranks="16-23,48-55",
        name="stage 1",
        peak_allocated_bytes=30 * 2**20,
        peak_reserved_bytes=40 * 2**20,
        allocated_bytes_end=20 * 2**20,
        device_used_bytes=50 * 2**20,
        capacity_bytes=80 * 2**30,
        peak_phase="",
        by_category={},
    )
    values = {
        "framework": "megatron",
        "world_size": 64,
        "layout": {},
        "num_microbatches": 8,
        "cluster": "dgx-h100",
        "device": "virtual",
        "cost_model": "roofline",
        "iteration_time_ms": 1500.0,
        "tokens_per_s_per_gpu": 4000.0,
        "tflops_per_gpu": 412.34,
        "breakdown_ms": Breakdown(compute=1, exposed_communication=0, bubble=0, host=0, optimizer=0),
        "slowest_rank": 0,
        "memory": (memory,),
        "slices": (),
        "classes": (),
        "findings": (),
        "unpriced_ops": {},
        "synthesized_reads": 0,
        "assumptions": (),
        "audit": Audit(),
        "simulate_seconds": 0.0,
    }
    return Prediction(**(values | given))


def test_times_become_the_predicted_ones_and_losses_are_marked():
    lines = rewrite_lines([ITERATION.format(n=1), ITERATION.format(n=3)], prediction())
    assert lines == [
        " [2026-01-02 03:04:05.000000] iteration        1/      50 | consumed samples:           16 | "
        "elapsed time per iteration (ms): 1500.0 | throughput per GPU (TFLOP/s/GPU): 412.3 | "
        "learning rate: 5.000000E-05 | global batch size:    16 | lm loss: 1.083221E+01* | loss scale: 1.0 | "
        "grad norm: 2.719* | number of skipped iterations:   0 | number of nan iterations:   0 |",
        lines[1],
    ]
    assert lines[1].startswith(" [2026-01-02 03:04:08.000000] iteration        3/")


def test_throughput_that_nobody_can_tell_is_said():
    (line,) = rewrite_lines([ITERATION.format(n=1)], prediction(tflops_per_gpu=None))
    assert "throughput per GPU (TFLOP/s/GPU): not predicted |" in line


def test_memory_is_that_of_the_ranks_class():
    assert rewrite_lines([MEMORY], prediction()) == [
        "[Rank 16] (after 2 iterations) memory (MB) | allocated: 20.00 | max allocated: 30.00 | reserved: 40.00"
        " | max reserved: 40.00"
    ]
    other = MEMORY.replace("Rank 16", "Rank 24")
    assert rewrite_lines([other], prediction()) == [other]


def test_lines_of_unknown_form_are_kept():
    assert rewrite_lines(["hello: 1 | world"], prediction()) == ["hello: 1 | world"]


def test_the_tap_reports_complete_log_lines_and_passes_everything_on():
    out, seen = io.StringIO(), []
    tap = LogTap(out, seen.append, is_log_line)
    line = ITERATION.format(n=1)
    for piece in ("training ...\n", line[:40], line[40:], "\n", MEMORY + "\n", "iteration 3\n"):
        tap.write(piece)
    assert seen == [line, MEMORY]
    assert out.getvalue() == f"training ...\n{line}\n{MEMORY}\niteration 3\n"


@pytest.mark.parametrize("module", ["torch", "megatron"])
def test_rewriting_imports_no_framework(module):
    code = (
        "import sys; from prism_plugins.integrations.megatron import MegatronIntegration as M;"
        "from prism_plugins.integrations.megatron.log import rewrite_lines;"
        f"sys.exit({module!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert MegatronIntegration().rewrite_log([], prediction()) == []
