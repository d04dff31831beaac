"""A hostile and a careless user against the real commands: one clear line, nothing overwritten, nothing left running.

Mistakes in flags, a crash in one slice, a script that never trains, full and read-only disks, Ctrl-C: test_launch.py.
Thirty layers on four stages and other mistakes in Megatron's arguments: test_megatron_slices.py.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launches import wait_for

pytestmark = pytest.mark.e2e

ONE = ("--prism-emulate", "--prism-world-size", "1")
"""The cheapest job there is: one slice."""
RUN = (sys.executable, "-m", "prism_plugins.run")
PRISM = (sys.executable, "-m", "prism_plugins.cli")


def refusal(done):
    """The one line of a mistake."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("prism: slice rank")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("prism: error: ")
    return lines[0]


def prism(place, *words, **options):
    return subprocess.run(
        [*PRISM, *map(str, words)], cwd=place.path, env=place.env, capture_output=True, text=True, **options
    )


def temporary_files(place):
    return [path for path in place.path.rglob("*") if path.name.endswith(".tmp") or ".new-" in path.name]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prism-emulate", "--prism-world-size", "0"), "must be between 1 and"),
        (("--prism-emulate", "--prism-world-size", "-8"), "not -8"),
        (("--prism-emulate", "--prism-world-size", "8", "--prism-ranks", "99"), "names rank 99"),
        (("--prism-emulate", "--prism-world-size", "8", "--prism-jobs", "0"), "--prism-jobs must be"),
        (
            ("--prism-emulate", "--prism-world-size", "8", "--prism-cluster", "/dev/zero"),
            "cannot be read: Is a device",
        ),
        (
            ("--", "--prism-emulate", "--prism-world-size", "8", "--prism-job", "2"),
            "did you mean --prism-jobs?",
        ),
    ],
)
def test_more_mistakes_in_flags_run_nothing(place, flags, said):
    assert said in refusal(place.run("train.py", flags=flags, check=False))
    assert not place.out.exists()


def test_a_script_that_does_not_exist_leaves_nothing(place):
    done = place.run("nothere.py", launcher=RUN, flags=("--prism-world-size", "8"), check=False)
    assert refusal(done) == "prism: error: script nothere.py does not exist"
    assert sorted(p.name for p in place.path.iterdir()) == ["train.py"]


def test_a_file_in_the_output_directorys_place(place):
    place.out.write_text("precious")
    assert f"--prism-out {place.out} is a file" in refusal(place.run("train.py", check=False))
    assert place.out.read_text() == "precious"


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (
            "import torch, os\nprint('last words', flush=True)\nos._exit(0)\n",
            1,
            "ended with status 0 and no report",
        ),
        ("import torch\ninput()\n", 1, "EOFError: EOF when reading a line"),
        ("import sys, torch\nsys.exit('no data')\n", 1, "it exited saying: no data"),
    ],
)
def test_scripts_that_end_oddly(place, source, status, said):
    (place.path / "odd.py").write_text(source)
    done = place.run("odd.py", flags=ONE, check=False)
    assert done.returncode == status
    assert said in done.stderr
    assert "prism_plugins/" not in done.stderr
    assert place.info()["status"] == "failed"


def test_an_odd_script_in_an_odd_place_without_a_reader(place):
    """Newline, markup and non-ASCII letters in every path; another working directory, megabytes and half lines from
    the script; a reader that leaves."""
    odd = place.path / "ü [red]\n[/x]"
    odd.mkdir(parents=True)
    (odd / "träin.py").write_text(
        "import os, runpy, sys\n"
        "os.chdir('/')\n"
        "print('y' * 3_000_000)\n"
        "print('z\\r' * 100_000, end='', flush=True)\n"
        f"sys.path.insert(0, {str(place.path)!r})\n"
        "runpy.run_module('train', run_name='__main__')\n"
    )
    place.out = odd / "out [/y]"
    # Started by hand: what stands before `import torch` would print in the launched process, too.
    command = place.command(odd / "träin.py", "--tp", 1, launcher=RUN, flags=ONE)
    with subprocess.Popen(
        command, cwd=place.path, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        child.stdout.close()
        assert "Traceback" not in child.stderr.read()
    assert child.returncode == 0
    assert place.info()["status"] == "ok"
    assert not temporary_files(place)
    done = prism(place, "show", place.out, check=True)
    assert "[/x]" in done.stdout
    assert len(prism(place, "ops", place.out, "--rank", "0", check=True).stdout.splitlines()) > 10


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one rank; copy it before breaking it."""
    from tests.e2e.launches import FILES, Place

    path = tmp_path_factory.mktemp("finished")
    shutil.copy(FILES / "train.py", path)
    place = Place(path)
    place.run("train.py", "--tp", 1, flags=ONE)
    return place


@pytest.mark.parametrize("command", [("show",), ("ops", "--rank", "0"), ("trace", "--ranks", "0")])
def test_output_that_cannot_be_written(finished, command):
    name, *rest = command
    words = [*PRISM, name, finished.out, *rest]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, env=finished.env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert refusal(done).endswith("No space left on device")
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words], env=finished.env, capture_output=True, text=True
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_full_or_closed_console_ends_no_run(finished, tmp_path):
    words = finished.command("train.py", "--tp", 1, "--prism-out", tmp_path / "run", flags=ONE)
    for shell in ('exec "$@" >/dev/full', 'exec "$@" >&-'):
        done = subprocess.run(
            ["sh", "-c", shell, "sh", *map(str, words)],
            cwd=finished.path, env=finished.env, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("the output is lost from here on") == ("full" in shell)
        assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "ok"


def test_an_ascii_terminal(finished):
    env = finished.env | {"PYTHONIOENCODING": "ascii"}
    for words in ([*PRISM, "show", finished.out], [*RUN, "--prism-help"]):
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("run.json", '"tp": 1', '"tp": -1'),
        ("run.json", '"tp": 1', '"tp": 4611686018427387904'),
        ("run.json", '"order": "tp-cp-ep-dp-pp"', '"order": "../../etc"'),
        ("run.json", '"num_sms": 132', '"num_sms": 0'),
        ("run.json", '"slices": [', '"slices": [77,'),
        ("slices/0/report.json", '"rank": 0', '"rank": "<script>"'),
        ("slices/0/report.json", "{", '{"x": ' + "[" * 100_000),
    ],
)
def test_run_directories_with_impossible_values(finished, tmp_path, file, old, new):
    run = tmp_path / "run"
    shutil.copytree(finished.out, run)
    text = (run / file).read_text()
    if old not in text:  # A default that is not written.
        old, new = '"layout": {', f'"layout": {{{new},'
    (run / file).write_text(text.replace(old, new, 1))
    refusal(prism(finished, "ops", run, "--rank", "0"))


def test_a_run_is_read_with_its_own_cluster(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished.out, run)
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"cluster": "dgx-h100"', '"cluster": "gone.toml"', 1))
    assert prism(finished, "ops", run, "--rank", "0").returncode == 0


def test_two_equal_runs_at_the_same_time(place):
    command = [*RUN, "train.py", "--tp", "1", "--prism-world-size", "1"]
    children = [
        subprocess.Popen(
            command, cwd=place.path, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for child in children:
        _, err = child.communicate(timeout=180)
        assert child.returncode == 0, err.decode()
    runs = list(place.path.glob("prism_out/*/prediction.json"))
    assert len(runs) == 2
    assert len(list((place.path / "cache").iterdir())) == 1
    assert not temporary_files(place)


def test_what_a_slice_starts_works_and_ends_with_a_killed_conductor(place):
    (place.path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "code = \"import torch, time; print('grandchild', torch.ones(2).sum().item(), flush=True); time.sleep(300)\"\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)\n"
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "print(next(iter(DataLoader(list(range(8)), batch_size=4, num_workers=1))))\n"
        "print(child.stdout.readline().strip(), child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    child = subprocess.Popen(
        place.command("parent.py", flags=ONE), cwd=place.path, env=place.env,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        lines = []
        while not (lines and lines[-1].startswith("grandchild")):
            lines.append(child.stdout.readline())
            assert lines[-1], "the slice ended"
    finally:
        child.kill()
        child.wait()
    assert "tensor([0, 1, 2, 3])\n" in lines
    grandchild = Path(f"/proc/{lines[-1].split()[-1]}")
    wait_for(lambda: not grandchild.exists() or ") Z" in (grandchild / "stat").read_text(), timeout=20)


def test_no_compiler_and_nothing_compiled_yet(place):
    tools = place.path / "bin"
    tools.mkdir()
    for name in ("sh", "env"):
        (tools / name).symlink_to(shutil.which(name))
    empty = place.path / "empty"
    empty.mkdir()
    place.env |= {"PATH": str(tools), "XDG_CACHE_HOME": str(empty), "TMPDIR": str(empty), "CXX": ""}
    done = place.run("train.py", "--tp", 1, flags=ONE, check=False)
    assert "install g++" in refusal(done)
    assert not list(empty.rglob("*.so"))


def test_no_home_and_no_place_to_keep_anything(place):
    """The compiled backend is found where it lies; slices are not kept."""
    file = place.path / "file"
    file.write_text("")
    backend = Path(place.env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place.env |= {"XDG_CACHE_HOME": str(backend), "PRISM_SLICE_CACHE": str(file / "cache")}
    del place.env["HOME"]
    place.run("train.py", "--tp", 1, flags=ONE)
    assert file.read_text() == ""
    assert not (place.path / "~").exists()
