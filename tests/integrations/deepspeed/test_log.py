"""DeepSpeed's log lines at target scale, from lines as DeepSpeed 0.19 and Trainer print them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from prism_plugins.integrations.deepspeed.log import Collector, bandwidths, comms_timer, rewrite_lines
from prism_plugins.integrations.deepspeed.log_flops import quantity
from prism_plugins.program.prediction import Audit, Breakdown, ClassMemory, Prediction

MICRO = "[Rank 0] time (ms) | fwd_microstep: 77.93 | bwd_microstep: 5239.95 | step_microstep: 0.10"
GLOBAL = "[Rank 0] time (ms) | fwd: 145.13 | bwd: 10508.45 | step: 31.66"
OPTIMIZER = "[Rank 0] time (ms) | optimizer_allgather: 21.36 | optimizer_step: 0.50"
THROUGHPUT = (
    "[2026-11-30 19:07:0{n},626] [INFO] [timer.py:264:stop] epoch=0/micro_step=6/global_step={n}, "
    "RunningAvgSamplesPerSec=2.5, CurrSamplesPerSec=2.4, MemAllocated=0.07GB, MaxMemAllocated=1.93GB"
)
COMMS = """\
Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)     tput_avg (Gbps)     busbw_avg (Gbps)
broadcast
                    32.0 KB             16                  642.96              43.75               0.01                0.01
all_reduce
                    1.88 MB             6                   71.42               10.01               8.28                7.24
log_summary_barrier
                    0B                  1                   0.15                0.15                0.00                0.00"""
FLOPS = """\
-------------------------- DeepSpeed Flops Profiler --------------------------
Profile Summary at step 2:
step (weights update latency), iter latency (sum of fwd, bwd and step latency)

world size:                                                             64
batch size per GPU:                                                     2
fwd flops per GPU:                                                      250 M
fwd latency:                                                            77.93 ms
fwd FLOPS per GPU = fwd flops per GPU / fwd latency:                    3.23 GFLOPS
bwd latency:                                                            5.24 s
bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency:                96.13 MFLOPS
fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency):      142.08 MFLOPS
step latency:                                                           93 us
iter latency:                                                           5.32 s
FLOPS per GPU = 3 * fwd flops per GPU / iter latency:                   142.08 MFLOPS
samples/second:                                                         3.01

    fwd latency - {'LlamaForCausalLM': '1.8 Gs'}
  984.19 K = 100% Params, 125.83 MMACs = 100% MACs, 1.8 Gs = 100% latency, 140 mFLOPS
    (embed): Embedding(65.54 K = 6.66% Params, 0 MACs = 0% MACs, 185.49 us = 0% latency, 0 FLOPS, 512, 128)
------------------------------------------------------------------------------"""
TIMERS = {
    "fwd_microstep": (1.0, 2.0),
    "bwd_microstep": (4.0, 5.0),
    "step_microstep": (0.0, 1.0),
    "fwd": (1.0, 2.0),
    "bwd": (4.0, 5.0),
    "step": (0.25, 1.0),
    "optimizer_allgather": (0.5,),
    comms_timer("all_reduce", "1.88 MB"): (0.1, 0.3),
}


def prediction(**given) -> Prediction:
    memory = ClassMemory(
        ranks="0-63",
        name="stage 0",
        peak_allocated_bytes=30 * 2**30,
        peak_reserved_bytes=40 * 2**30,
        allocated_bytes_end=20 * 2**30,
        device_used_bytes=50 * 2**30,
        capacity_bytes=80 * 2**30,
        peak_phase="",
        by_category={},
    )
    values = {
        "framework": "deepspeed",
        "world_size": 64,
        "layout": {},
        "num_microbatches": 2,
        "cluster": "dgx-h100",
        "device": "virtual",
        "cost_model": "roofline",
        "iteration_time_ms": 1500.0,
        "tokens_per_s_per_gpu": None,
        "tflops_per_gpu": None,
        "samples_per_s": 170.666,
        "timers_ms": TIMERS,
        "logging_rank": 0,
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


def rewritten(*lines, **given):
    return rewrite_lines(lines, prediction(**given))


def collected(text):
    lines = []
    collect = Collector(SimpleNamespace(log_line=lines.append))
    for line in text.split("\n"):
        if collect(line):
            lines.append(line)
    return lines


def test_timers_show_what_they_would_measure_micro_batch_by_micro_batch():
    assert rewritten(MICRO, OPTIMIZER, MICRO, GLOBAL, MICRO) == [
        "[Rank 0] time (ms) | fwd_microstep: 1.00 | bwd_microstep: 4.00 | step_microstep: 0.00",
        "[Rank 0] time (ms) | optimizer_allgather: 0.50 | optimizer_step: not predicted",
        "[Rank 0] time (ms) | fwd_microstep: 2.00 | bwd_microstep: 5.00 | step_microstep: 1.00",
        "[Rank 0] time (ms) | fwd: 3.00 | bwd: 9.00 | step: 1.25",
        "[Rank 0] time (ms) | fwd_microstep: 1.00 | bwd_microstep: 4.00 | step_microstep: 0.00",
    ]


def test_throughput_and_time_stamps():
    first, second = rewritten(THROUGHPUT.format(n=3), THROUGHPUT.format(n=5))
    assert "RunningAvgSamplesPerSec=170.666, CurrSamplesPerSec=170.666" in first
    assert "MemAllocated=20.00GB, MaxMemAllocated=30.00GB" in first
    assert first.startswith("[2026-11-30 19:07:03,626]")
    assert second.startswith("[2026-11-30 19:07:06,626]")
    (line,) = rewritten(THROUGHPUT.format(n=3), samples_per_s=None)
    assert "CurrSamplesPerSec=not predicted" in line


def test_the_pipelines_steps():
    line = "steps: 3 loss: 6.2383 aux_loss: 0.1 iter time (s): 0.079 samples/sec: 813.1"
    assert rewritten(line) == [
        "steps: 3 loss: 6.2383* aux_loss: 0.1* iter time (s): 1.500 samples/sec: 170.666"
    ]


def test_the_table_of_the_communication_logger():
    lines = rewritten(*COMMS.split("\n"), MICRO)
    assert lines[2].split() == ["32.0", "KB", "16", *("not predicted " * 4).split()]
    size, count, total, average, rate, wire = (lines[4][i : i + 20].strip() for i in range(20, 140, 20))
    assert (size, count, total, average) == ("1.88 MB", "6", "1.20", "0.20")
    assert float(rate) == pytest.approx(2 * 1.88 * 2**20 * 8 / 0.2e-3 / 1e9, rel=0.01)
    assert float(wire) == pytest.approx(float(rate) * 63 / 64, rel=0.01)
    assert "fwd_microstep: 1.00" in lines[-1]


def test_bandwidths_as_deepspeed_defines_them():
    comms_logging = pytest.importorskip("deepspeed.utils.comms_logging")
    import deepspeed.comm as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda *a: 64)
        for op in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter", "all_reduce", "send"):
            expected = comms_logging.calc_bw_log(op, 3 * 2**20, 0.7)
            assert bandwidths(op, comms_logging.convert_size(3 * 2**20), 0.7, 64) == pytest.approx(expected)


def test_the_table_of_the_flops_profiler():
    lines = rewritten(*FLOPS.split("\n"), *FLOPS.split("\n"))
    table = {
        label: value.strip()
        for line in lines[: len(lines) // 2]
        for label, _, value in [line.partition(": ")]
        if value
    }
    assert table["fwd latency"] == "1 ms"
    assert table["bwd latency"] == "4 ms"
    assert table["iter latency"] == "5.25 ms"
    assert table["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"] == "250 GFLOPS"
    assert table["bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency"] == "125 GFLOPS"
    assert table["FLOPS per GPU = 3 * fwd flops per GPU / iter latency"] == "142.86 GFLOPS"
    assert table["samples/second"] == f"{128 / 5.25e-3:.2f}"
    assert table["world size"] == "64"
    assert sum("latency not predicted" in line for line in lines) == 4
    assert not any("Gs" in line for line in lines)
    # The second table of a step is printed after its second micro-batch.
    assert any(line.startswith("iter latency: ") and line.split()[-2:] == ["13.25", "ms"] for line in lines)


def test_the_flops_profiler_without_timers():
    lines = rewritten(*FLOPS.split("\n"), timers_ms={})
    assert sum(line.endswith("not predicted") for line in lines) == 9 + 2  # fields, and modules


@pytest.mark.parametrize(
    ("value", "text"), [(5.24, "5.24 s"), (0.0779, "77.9 ms"), (9.3e-5, "93 us"), (3.23e9, "3.23 Gs")]
)
def test_quantities(value, text):
    assert quantity(value, "s") == text


def test_trainers_dictionaries():
    assert rewritten(
        "{'loss': '0.0079', 'grad_norm': '8', 'learning_rate': '5e-05', 'epoch': '0.25'}",
        "\x1b[A{'eval_loss': 0.001, 'eval_runtime': 0.06, 'eval_samples_per_second': 42.6, 'epoch': 0.5}",
        "{'train_runtime': '12', 'train_loss': 1.5}",
    ) == [
        "{'loss': '0.0079*', 'grad_norm': '8*', 'learning_rate': '5e-05', 'epoch': '0.25'}",
        "{'eval_loss': '0.001*', 'eval_runtime': 'not predicted', 'eval_samples_per_second': 'not predicted', "
        "'epoch': '0.5'}",
        "{'train_runtime': 'not predicted', 'train_loss': '1.5*'}",
    ]


def test_the_log_is_told_from_what_else_a_script_prints():
    text = f"model built\n{MICRO}\nstep 1 loss 2.0\n{COMMS}\nafter the table\n{FLOPS}\nvalidation: 3"
    assert collected(text) == [MICRO, *COMMS.split("\n"), *FLOPS.split("\n")]


def test_memory_lines_keep_what_they_are_about():
    memory = "MA 0.07 GB         Max_MA 1.93 GB         CA 1.97 GB         Max_CA 2 GB "
    host = "CPU Virtual Memory:  used = 5.54 GB, percent = 23.5%"
    lines = collected(f"hello\nEngine after backward\n{memory}\n{host}\nbye")
    assert lines == ["Engine after backward", memory, host]
    assert rewritten(*lines)[1:] == [memory, "CPU Virtual Memory:  used = not predicted"]


def test_an_unknown_line_is_kept():
    assert rewritten("something else: 3") == ["something else: 3"]
