"""Training logs and flight recorder dumps beside a run."""

import json
import os
import pickle

import msgspec
import pytest

from prism_plugins import cli
from prism_plugins.cli_run import load_view
from prism_plugins.diff.read_flight_recorder import read_flight_recorder
from prism_plugins.diff.read_log import read_log
from prism_plugins.emit.prediction_json import read_prediction, write_prediction
from prism_plugins.program.model import EventKind

MEGATRON = """\
 [2026-11-30 22:08:31.331933] iteration        1/      12 | consumed samples:            8 | elapsed time per iteration (ms): 3111.0 | throughput per GPU (TFLOP/s/GPU): 59.8 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 35958.20 | max allocated: 43705.67 | reserved: 46346.00 | max reserved: 46346.00
[Rank 0] (after 2 iterations) memory (MB) | allocated: 35958.20 | max allocated: 55917.24 | reserved: 60418.00 | max reserved: 60418.00
(min, max) time across ranks (ms):
    forward-backward ...............................: (500.00, 510.00)
    optimizer ......................................: (40.00, 50.50)
"""
DEEPSPEED = """\
[2026-11-30 20:17:29,011] [INFO] [logging.py:128:log_dist] [Rank 0] time (ms) | fwd: 60.11 | bwd: 120.22 | step: 9.33
[2026-11-30 20:17:29,012] [INFO] [timer.py:258:stop] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=20.1, CurrSamplesPerSec=21.5, MemAllocated=13.25GB, MaxMemAllocated=40.5GB
"""

PUBLISHED = """\
[2023-04-18 01:46:59,171] [INFO] [timer.py:199:stop] epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=173.4455644119137, CurrSamplesPerSec=171.97903593624417, MemAllocated=3.96GB, MaxMemAllocated=22.95GB
[2023-04-18 01:47:06,619] [INFO] [timer.py:199:stop] epoch=0/micro_step=20/global_step=20, RunningAvgSamplesPerSec=172.66319574149418, CurrSamplesPerSec=171.4073346136102, MemAllocated=3.96GB, MaxMemAllocated=22.95GB
[2023-04-18 01:47:14,074] [INFO] [timer.py:199:stop] epoch=0/micro_step=30/global_step=30, RunningAvgSamplesPerSec=172.38095135217128, CurrSamplesPerSec=171.8685942346471, MemAllocated=3.96GB, MaxMemAllocated=22.95GB
[2023-04-18 01:47:21,522] [INFO] [timer.py:199:stop] epoch=0/micro_step=40/global_step=40, RunningAvgSamplesPerSec=172.29462323261063, CurrSamplesPerSec=172.31751921224577, MemAllocated=3.96GB, MaxMemAllocated=22.95GB
[2023-04-18 01:47:28,973] [INFO] [timer.py:199:stop] epoch=0/micro_step=50/global_step=50, RunningAvgSamplesPerSec=172.2269859085574, CurrSamplesPerSec=172.28478301819888, MemAllocated=3.96GB, MaxMemAllocated=22.95GB
"""
"""Of deepspeedai/DeepSpeedExamples, applications/DeepSpeed-Chat/training/step1_supervised_finetuning/training_log_output/
opt-1.3b-globalBatchSize128.log (45b4b71)."""


class TestLogs:
    def test_lines_of_a_log_that_deepspeed_publishes(self, run, tmp_path, capsys):
        prediction = read_prediction(run.prediction)
        write_prediction(run.prediction, msgspec.structs.replace(prediction, samples_per_s=180.0))
        log = tmp_path / "train.log"
        log.write_text(PUBLISHED)
        real = read_log(log)
        assert (real.samples_per_s, real.iterations) == (171.97903593624417, 5)
        assert real.peak_allocated_bytes == {0: round(22.95 * 2**30)}
        assert cli.main(["diff", "latest", str(log)]) == 0
        out = capsys.readouterr().out
        assert "samples/s" in out
        assert "+4.7 %" in out

    def test_another_run_is_no_recording(self, run, capsys):
        assert cli.main(["diff", "latest", str(run.path)]) == 2
        assert "prism report RUN --with" in capsys.readouterr().err

    def test_megatron(self, tmp_path):
        log = tmp_path / "train.log"
        lines = [MEGATRON]
        lines += [
            f" iteration {i}/ 12 | elapsed time per iteration (ms): {580 + i / 10} |\n" for i in range(2, 13)
        ]
        log.write_text("".join(lines))
        real = read_log(log)
        assert real.iterations == 12
        assert real.iteration_ms == pytest.approx(580.8)  # the first three are left out
        assert real.timers_ms == {"forward-backward": 510.0, "optimizer": 50.5}
        assert real.peak_allocated_bytes == {0: round(55917.24 * 2**20)}

    def test_deepspeed(self, tmp_path):
        log = tmp_path / "train.log"
        log.write_text(DEEPSPEED)
        real = read_log(log)
        assert real.timers_ms == {"fwd": 60.11, "bwd": 120.22, "step": 9.33}
        assert real.samples_per_s == 21.5
        assert real.peak_allocated_bytes == {0: round(40.5 * 2**30)}

    def test_beside_a_run(self, run, tmp_path, capsys):
        prediction = read_prediction(run.prediction)
        write_prediction(
            run.prediction, msgspec.structs.replace(prediction, timers_ms={"optimizer": (25.0, 30.55)})
        )
        log = tmp_path / "train.log"
        log.write_text(MEGATRON)
        assert cli.main(["diff", "latest", str(log)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "1,234.5 ms 3,111.0 ms -60.3 %" in text
        assert "timer optimizer 55.5 ms 50.5 ms +10.0 %" in text
        assert "peak allocated, rank 0 55.0 GiB 54.6 GiB +0.7 %" in text


def dump(view, rank, iterations):
    """What the recorder of a rank holds after some iterations."""
    program, _ = view.timed_program(rank)
    entries = []
    for _ in range(iterations):
        for ref in program.events["ref"][program.events["kind"] == EventKind.COMM].tolist():
            comm = program.comms[ref]
            group = program.groups[comm.group]
            entries.append(
                {
                    "record_id": len(entries), "process_group": (group.name, group.desc),
                    "profiling_name": f"nccl:{comm.kind}" + (" 0->1" if comm.kind in ("send", "recv") else ""),
                    "input_sizes": [[comm.in_numel or comm.out_numel]], "output_sizes": [[comm.out_numel or comm.in_numel]],
                    "state": "completed", "is_p2p": comm.kind in ("send", "recv"),
                }
            )  # fmt: skip
    return {"version": "2.10", "entries": entries, "pg_config": {}}


class TestFlightRecorder:
    @pytest.mark.parametrize("form", ["pickle", "json"])
    def test_calls(self, run, tmp_path, capsys, form):
        held = dump(load_view(run), 4, 3)
        path = tmp_path / "nccl_trace_rank_4"
        path.write_bytes(pickle.dumps(held) if form == "pickle" else json.dumps(held).encode())
        real = read_flight_recorder(path)
        assert real.ranks[0].rank == 4
        assert cli.main(["diff", "latest", str(path)]) == 0
        text = capsys.readouterr().out
        line = next(line for line in text.splitlines() if line.startswith("all_reduce 16777216 in TENSOR"))
        assert line.split()[-1] == "3.00"
        assert "not predicted" not in text

    def test_the_run_s_own_dumps_show_nothing_unexpected(self, run, tmp_path, capsys):
        assert cli.main(["flight-recorder", "latest", "--out", str(tmp_path)]) == 0
        assert cli.main(["diff", "latest", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert "recv 16777216 in PIPELINE_MODEL_PARALLEL_GROUP" in text
        assert "not predicted" not in text
        assert "not in the dump" not in text

    def test_a_call_that_was_not_predicted(self, run, tmp_path, capsys):
        held = dump(load_view(run), 0, 1)
        held["entries"].append(
            {"process_group": ("9", "STRANGE"), "profiling_name": "nccl:all_gather", "input_sizes": [[7]]}
        )
        path = tmp_path / "dump0"
        path.write_bytes(pickle.dumps(held))
        assert cli.main(["diff", "latest", str(path)]) == 0
        assert "in the dump, not predicted: all_gather 7 in STRANGE" in capsys.readouterr().out

    def test_a_pickle_that_would_run_code_is_refused(self, run, tmp_path, capsys):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "made"),)

        path = tmp_path / "dump"
        path.write_bytes(pickle.dumps({"entries": [Evil()]}))
        assert cli.main(["diff", "latest", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize(
        "content", [b"\x80", b"\x80\x04.", pickle.dumps([1]), pickle.dumps({"entries": [3]})]
    )
    def test_broken(self, run, tmp_path, capsys, content):
        path = tmp_path / "dump"
        path.write_bytes(content)
        assert cli.main(["diff", "latest", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
