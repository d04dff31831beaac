"""The prism command: what it prints, and how it refuses."""

import gzip
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import msgspec
import pytest

from prism_plugins import cli, cli_doctor, cli_run
from prism_plugins.rundir import RunDir


def refused(capsys, *words):
    """Run a command that must be refused; returns its one line."""
    try:
        status = cli.main(list(words))
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2
    assert not out
    assert err.startswith("prism: error: ")
    assert err.count("\n") == 1
    return err


class TestShow:
    def test_newest_run_is_the_default(self, run, capsys):
        assert cli.main(["show"]) == 0
        text = capsys.readouterr().out
        assert "1,234.5 ms" in text
        assert "prism_out/20260101-000000-train/prediction.json" in text

    def test_a_run_that_failed_names_the_logs(self, run, capsys):
        run.write_info(msgspec.structs.replace(run.read_info(), status="failed"))
        assert "no prediction (status: failed): look into the logs of its slices, prism_out/" in refused(
            capsys, "show"
        )

    def test_a_newer_run_that_failed_is_passed_over(self, run, capsys):
        failed = RunDir(run.path.parent / "20260102-000000-train")
        failed.path.mkdir()
        failed.write_info(msgspec.structs.replace(run.read_info(), status="failed"))
        os.utime(run.run, (1, 1))
        assert cli.main(["show"]) == 0
        out, err = capsys.readouterr()
        assert "1,234.5 ms" in out
        assert "20260101-000000-train is the latest run with a prediction" in err
        assert "20260102-000000-train, the latest, has none" in err

    def test_log(self, run, capsys):
        assert cli.main(["show", "latest", "--log"]) == 0
        assert " iteration 1/ 2 | elapsed 1.2 |\n" in capsys.readouterr().out

    def test_a_foreign_run_cannot_steer_the_terminal(self, run, capsys):
        data = json.loads(run.prediction.read_text())
        data["assumptions"] = ["calm \x1b]0;title\x07 \x9b2J words"]
        run.prediction.write_text(json.dumps(data))
        assert cli.main(["show"]) == 0
        text = capsys.readouterr().out
        assert "calm" in text
        assert not set(text) & {"\x1b", "\x07", "\x9b"}

    def test_json_is_the_file(self, run, capsys):
        assert cli.main(["show", str(run.path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["iteration_time_ms"] == 1234.5

    def test_communication(self, run, capsys):
        assert cli.main(["show", "latest", "--communication", "--rank", "4"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("rank 4, one iteration")
        for group in ("tp 4-5", "dp 4,6", "pp 0,4"):
            assert group in text
        assert "outside the world" in refused(capsys, "show", "latest", "--communication", "--rank", "8")
        assert "--communication" in refused(capsys, "show", "latest", "--rank", "0")


class TestOps:
    def test_text(self, run, capsys):
        assert cli.main(["ops", "latest", "--rank", "5", "--comm"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "rank 5" in lines[0]
        assert "inferred" in lines[0]
        reduce = next(line for line in lines if "all_reduce" in line)
        assert "33554432 bfloat16" in reduce
        assert "TENSOR_MODEL_PARALLEL_GROUP [4-5]" in reduce
        assert any("recv ← 1 async" in line for line in lines)
        assert not any("aten::" in line for line in lines)

    def test_json_has_one_object_a_line_in_issue_order(self, run, build, capsys):
        assert cli.main(["ops", "latest", "--rank", "0", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        program = build[0](0)
        assert [row["index"] for row in rows] == [
            i for i, kind in enumerate(program.events["kind"].tolist()) if kind in (0, 1)
        ]
        first = rows[0]
        assert first["name"] == "aten::mm"
        assert first["phase"] == "forward mb 0"
        assert first["in_shapes"] == [[4096, 4096], [4096, 11008]]
        assert first["bytes"] == 2 * (4096 * 4096 + 2 * 4096 * 11008)
        assert first["start_us"] > 0
        assert first["duration_us"] > 100
        assert next(row for row in rows if row["name"] == "aten::view")["duration_us"] == 0
        kernels = [row for row in rows if row["stream"] == "0" and row["duration_us"]]
        assert [row["start_us"] for row in kernels] == sorted(row["start_us"] for row in kernels)
        comm = next(row for row in rows if row["kind"] == "comm")
        assert comm["group_ranks"] == [0, 1]
        assert comm["stream"] == "nccl:0"
        assert comm["duration_us"] > comm["wait_us"] >= 0

    def test_a_rank_no_slice_ran_is_like_its_representative_in_other_groups(self, run, capsys):
        tables = []
        for rank in (0, 2):
            assert cli.main(["ops", "latest", "--rank", str(rank), "--json"]) == 0
            tables.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
        assert 2 not in run.read_info().slices
        for mine, other in zip(*tables, strict=True):
            for key in mine.keys() - {"group_ranks", "peer"}:
                assert mine[key] == other[key]
        groups = [{tuple(row["group_ranks"]) for row in table if row["group_ranks"]} for table in tables]
        assert groups == [{(0, 1), (0, 2), (0, 4)}, {(2, 3), (0, 2), (2, 6)}]

    def test_phase_filter(self, run, capsys):
        assert cli.main(["ops", "latest", "--rank", "0", "--phase", "Optimizer", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {row["phase"] for row in rows} == {"optimizer"}

    def test_refusals(self, run, capsys):
        assert "outside the world of 8 ranks" in refused(capsys, "ops", "latest", "--rank", "8")
        assert "outside the world" in refused(capsys, "ops", "latest", "--rank", "-1")
        phases = refused(capsys, "ops", "latest", "--rank", "0", "--phase", "evaluate")
        assert "it has forward, send_forward_recv_backward, backward" in phases
        assert "--rank" in refused(capsys, "ops", "latest")
        assert "'x'" in refused(capsys, "ops", "latest", "--rank", "x")


class TestTrace:
    def test_writes_the_ranks_asked_for(self, run, capsys):
        assert cli.main(["trace", "latest", "--ranks", "0-1,6"]) == 0
        paths = [pathlib.Path(line) for line in capsys.readouterr().out.splitlines()]
        assert [path.name for path in paths] == ["rank0.json.gz", "rank1.json.gz", "rank6.json.gz"]
        ranks = [json.loads(gzip.decompress(path.read_bytes()))["distributedInfo"]["rank"] for path in paths]
        assert ranks == [0, 1, 6]
        events = json.loads(gzip.decompress(paths[2].read_bytes()))["traceEvents"]
        tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
        pair = "nccl PIPELINE_MODEL_PARALLEL_GROUP [2, 6] with rank 2"
        assert any(pair in track for track in tracks), "an uncoalesced send has the communicator of its pair"

    @pytest.mark.parametrize("ranks", ["8", "3-1", "x", "0,,1", "0-"])
    def test_refusals_write_nothing(self, run, capsys, ranks):
        assert "--ranks" in refused(capsys, "trace", "latest", "--ranks", ranks)
        assert not run.kineto.exists()


class TestRunDirectories:
    """Every command meets them through the same door."""

    @pytest.mark.parametrize(
        "command",
        [
            ("show",),
            ("show", "--communication"),
            ("report",),
            ("ops", "--rank", "0"),
            ("trace", "--ranks", "0"),
            ("trace", "--format", "perfetto"),
            ("what-if", "--cluster", "dgx-b200"),
        ],
    )
    def test_unusable(self, run, capsys, tmp_path, command):
        name, *rest = command
        words = lambda path: (name, str(path), *rest)  # noqa: E731
        assert "does not exist" in refused(capsys, *words(tmp_path / "nowhere"))
        assert "is a file" in refused(capsys, *words(run.predicted_log))
        assert "not a run directory" in refused(capsys, *words(tmp_path))

        whole = run.run.read_text()
        run.run.write_text(whole[: len(whole) // 2])
        assert "truncated" in refused(capsys, *words(run.path))
        run.run.write_text('{"schema": 1, "name": "something else"}')
        assert "not what it should be" in refused(capsys, *words(run.path))
        run.run.write_text(whole.replace('"schema": 1', '"schema": 999', 1))
        assert "newer version" in refused(capsys, *words(run.path))
        run.run.write_text(whole.replace('"ok"', '"interrupted"'))
        assert "interrupted" in refused(capsys, *words(run.path))

    def test_no_run_at_all(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert "no run directory under" in refused(capsys, "show")

    def test_latest_is_the_newest(self, run, tmp_path):
        newer = tmp_path / "prism_out" / "a"
        newer.mkdir()
        (newer / "run.json").write_bytes(run.run.read_bytes())
        os.utime(newer / "run.json", (2e9, 2e9))
        assert cli_run.open_run("latest").path.name == "a"

    def test_truncated_prediction(self, run, capsys):
        run.prediction.write_text(run.prediction.read_text()[:100])
        assert "prediction.json is truncated" in refused(capsys, "show")

    @pytest.mark.parametrize("keep", [0, 10, 1000, -30])
    def test_truncated_program(self, run, capsys, keep):
        program = run.slice(0).program
        program.write_bytes(program.read_bytes()[:keep])
        assert "program.npz" in refused(capsys, "ops", "latest", "--rank", "0")


def test_help_teaches(capsys):
    for words in ([], ["show"], ["ops"], ["trace"], ["doctor"]):
        with pytest.raises(SystemExit) as stop:
            cli.main([*words, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "examples:" in text or words == ["doctor"]


def test_unknown_command(capsys):
    assert "doctr" in refused(capsys, "doctr")


def test_a_closed_pipe_is_silent(run):
    script = "import sys; sys.argv[0] = 'prism'; from prism_plugins.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "show", str(run.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == cli.EXIT_BROKEN_PIPE


def test_the_command_does_not_import_torch(run):
    code = (
        "import sys; from prism_plugins.cli import main; status = main(['show']); "
        "main(['doctor']); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=run.path.parent.parent
    )


class TestDoctor:
    def test_report(self, capsys):
        cli.main(["doctor"])
        text = capsys.readouterr().out
        for what in ("python", "torch", "compiler", "autoload", "virtual GPU", "integrations", "machine"):
            assert what in text

    def test_no_compiler_says_what_to_install(self, monkeypatch, capsys):
        monkeypatch.setattr(cli_doctor.shutil, "which", lambda _: None)
        assert cli.main(["doctor"]) == 1
        assert "apt install g++" in " ".join(capsys.readouterr().out.split())

    def test_a_simulation_in_python_is_told(self, monkeypatch, capsys):
        monkeypatch.setattr("prism_plugins.simulate.native.is_compiled", lambda: False)
        cli.main(["doctor"])
        assert "about four times slower, same results" in " ".join(capsys.readouterr().out.split())

    def test_autoload_switched_off(self, monkeypatch, capsys):
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        cli.main(["doctor"])
        assert "python -m prism_plugins.run" in " ".join(capsys.readouterr().out.split())

    def test_no_torch(self, monkeypatch, capsys):
        monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
        assert cli.main(["doctor"]) == 1
        assert "pip install 'torch" in " ".join(capsys.readouterr().out.split())

    def test_a_check_that_fails_is_a_problem_not_a_traceback(self, monkeypatch, capsys):
        def _broken():
            raise RuntimeError("boom")

        monkeypatch.setattr(cli_doctor, "_EXAMINERS", (_broken,))
        assert cli.main(["doctor"]) == 1
        assert "boom" in capsys.readouterr().out
