"""What every process that imports torch pays when nothing was asked for, and who is taken over."""

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

from prism_plugins import autoload
from prism_plugins.arming import conductor_arguments, launcher_advice, parse_command_line, take_over


def clean_environment(**extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PRISM_")}
    return env | extra


def test_without_the_flag_only_the_entry_module_is_imported():
    code = (
        "import torch, sys, json;"
        "print(json.dumps([sorted(m for m in sys.modules if m.startswith('prism_plugins')), 'rich' in sys.modules]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True
    )
    modules, rich = json.loads(out.stdout.splitlines()[-1])
    assert modules == ["prism_plugins", "prism_plugins.autoload"]
    assert not rich


def test_without_the_flag_arming_takes_less_than_a_millisecond(monkeypatch):
    monkeypatch.delenv("PRISM_EMULATE", raising=False)
    monkeypatch.delenv("PRISM_SLICE", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"] + ["--some-flag", "1"] * 500)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        autoload.arm()
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 1e-3


def test_importing_the_entry_module_takes_less_than_a_millisecond():
    code = (
        "import os, sys, time; import prism_plugins; t = time.perf_counter(); import prism_plugins.autoload;"
        "print(time.perf_counter() - t)"
    )
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    )
    assert best < 1e-3


@pytest.mark.parametrize("value", ["0", "", "false", "off"])
def test_environment_switch_off(monkeypatch, value):
    monkeypatch.setenv("PRISM_EMULATE", value)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert not autoload._requested()


@pytest.mark.parametrize(
    "word", ["--prism-emulate", "--prism-emulate=yes", "--prism-emulat", "--prism-world-size=8"]
)
def test_any_flag_of_ours_arms(monkeypatch, word):
    monkeypatch.delenv("PRISM_EMULATE", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", word])
    assert autoload._requested()


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (["--prism-emulate=yes", "--prism-world-size", "8"], {}, "--prism-emulate takes no value"),
        (["--prism-emulat", "--prism-world-size", "8"], {}, "did you mean --prism-emulate?"),
        (["--lr", "1", "--prism-world-size=8"], {}, "--prism-world-size without --prism-emulate; add it"),
        (["--prism-world-size=8"], {"PRISM_EMULATE": "0"}, "--prism-world-size without --prism-emulate"),
        ([], {"PRISM_EMULATE": "maybe"}, "PRISM_EMULATE is a switch: 1 or 0, not 'maybe'"),
    ],
)
def test_a_half_given_flag_never_trains_for_real(tmp_path, words, environ, said):
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('trained for real')\n")
    done = subprocess.run(
        [sys.executable, str(script), *words],
        cwd=tmp_path,
        env=clean_environment(**environ),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == [script]


def test_slices_and_their_children_never_arm(monkeypatch):
    monkeypatch.setenv("PRISM_SLICE", "3")
    monkeypatch.setenv("PRISM_EMULATE", "1")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--prism-emulate"])
    assert not autoload._requested()


def arguments(command, argv=None):
    words = command.split()
    return conductor_arguments(parse_command_line(words), argv if argv is not None else words[1:])


@pytest.mark.parametrize(
    "command",
    [
        "python /venv/bin/torchrun --nproc-per-node 1 train.py --prism-emulate",
        "python -m torch.distributed.run --nproc-per-node 1 train.py --prism-emulate",
        "python -m torch.distributed.launch train.py --prism-emulate",
        "python -m torch.distributed.launcher.api train.py --prism-emulate",
        "python /venv/bin/deepspeed --num_gpus 1 train.py --prism-emulate",
        "python /venv/bin/deepspeed.pt --num_gpus 1 train.py --prism-emulate",
        "python -u -m deepspeed.launcher.launch --world_info=x train.py --prism-emulate",
        "python /venv/bin/accelerate launch train.py --prism-emulate",
        "python -m accelerate.commands.launch train.py --prism-emulate",
        "python /venv/bin/prism show x --prism-emulate",
        "python /venv/bin/pytest --prism-emulate",
        "python -m pytest tests --prism-emulate",
        "python -m prism_plugins.run train.py --prism-emulate",
        "python -m prism_plugins.slice spec.json --prism-emulate",
        "python -m ipykernel_launcher -f x --prism-emulate",
        "python -m ipykernel -f x --prism-emulate",
        "python",
        "python -i",
        "python -c 'import torch' --prism-emulate",
        "python - --prism-emulate",
    ],
)
def test_not_taken_over(command):
    assert arguments(command) is None


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ("deepspeed --num_gpus 1 train.py --prism-emulate --hostfile x", {}, []),
        ("deepspeed --hostfile=hosts train.py --prism-emulate", {}, ["--num_gpus 1"]),
        ("deepspeed -H hosts --autotuning run train.py --prism-emulate", {}, ["autotuning", "--num_gpus 1"]),
        ("ds --num_gpus 1 train.py --prism-emulate", {"DS_ACCELERATOR": "cuda"}, ["DS_ACCELERATOR=cuda"]),
        ("ds --num_gpus 1 train.py --prism-emulate", {"DS_ACCELERATOR": "cpu"}, []),
        ("torchrun --nnodes 2 train.py --prism-emulate", {"DS_ACCELERATOR": "cuda"}, []),
    ],
)
def test_what_would_stop_deepspeeds_launcher_is_told(words, environ, said):
    name, *rest = words.split()
    advice = launcher_advice(parse_command_line(["python", f"/venv/bin/{name}", *rest]), environ)
    assert len(advice) == len(said)
    assert all(part in line for part, line in zip(said, advice, strict=True))


def test_an_unknown_tool_that_passes_the_script_on_is_not_taken_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert arguments("python -m mytool run train.py --lr 1 --prism-emulate") is None
    assert arguments("python -m mypkg.train --config train.py --prism-emulate") is not None


def test_scripts_and_modules_are_taken_over_with_all_arguments():
    assert arguments("python -u train.py --lr 0.1 --prism-emulate --x=y") == (
        ["-u", "-P", "-m", "prism_plugins.run", "train.py", "--lr", "0.1", "--prism-emulate", "--x=y"]
    )
    assert arguments("python -X dev -W ignore -um pkg.train a --prism-emulate") == (
        [
            "-X",
            "dev",
            "-W",
            "ignore",
            "-u",
            "-P",
            "-m",
            "prism_plugins.run",
            "-m",
            "pkg.train",
            "a",
            "--prism-emulate",
        ]
    )
    assert arguments("python -Im pkg.train --prism-emulate")[:3] == ["-I", "-P", "-m"]


def test_a_script_run_inside_a_profiler_is_taken_over_without_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    got = arguments(
        "python -m cProfile -o out train.py --lr 1 --prism-emulate",
        argv=["train.py", "--lr", "1", "--prism-emulate"],
    )
    assert got == ["-P", "-m", "prism_plugins.run", "train.py", "--lr", "1", "--prism-emulate"]
    assert "without cProfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python train.py a -m b", ((), "script", "train.py", ("a", "-m", "b"))),
        ("python -mpkg.mod a", ((), "module", "pkg.mod", ("a",))),
        ("python -Wignore -Xfaulthandler s.py", (("-Wignore", "-Xfaulthandler"), "script", "s.py", ())),
        ("python -bbX dev s.py", (("-bbX", "dev"), "script", "s.py", ())),
        (
            "python --check-hash-based-pycs never s.py",
            (("--check-hash-based-pycs", "never"), "script", "s.py", ()),
        ),
        ("python -E -c pass x", (("-E",), "command", "pass", ("x",))),
        ("python", ((), "interactive", "", ())),
    ],
)
def test_command_line_is_split_as_cpython_does(words, expected):
    assert tuple(parse_command_line(words.split())) == expected


def test_torchruns_traceback_is_replaced_by_what_went_wrong(tmp_path, monkeypatch, capsys):
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    monkeypatch.setattr(sys, "orig_argv", ["python", "torchrun", "train.py", "--prism-emulate"])
    monkeypatch.setattr(sys, "argv", ["torchrun", "train.py", "--prism-emulate"])
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    take_over()

    def failed(content):
        file = tmp_path / "error.json"
        file.write_text(content)
        failure = errors.ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
        error = errors.ChildFailedError("train.py", {0: failure})
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err

    ours = {"message": {"message": "lines\nprism: error: no", "extraInfo": {"timestamp": "1"}}}
    assert failed(json.dumps(ours)) == "prism: error: no\n"
    assert not seen
    assert failed(json.dumps({"message": "of another program", "timestamp": "1"})) == ""
    assert len(seen) == 1
