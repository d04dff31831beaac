"""The script runs as ``python script.py`` and ``python -m module`` would run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import json, pickle, sys, multiprocessing
class Thing: pass
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "spec": __spec__ is None,
    "main": sys.modules["__main__"].__dict__ is globals(), "pickled": pickle.loads(pickle.dumps(Thing())).__class__ is Thing,
    "doc": __doc__, "package": __package__,
}))
"""

RUN = """
import sys, msgspec
from prism_plugins.program.slices import GpuFacts, SliceSpec
from prism_plugins.script import run_script, script_traceback
spec = SliceSpec(rank=0, world_size=1, gpus_per_node=8, argv=tuple(sys.argv[2:]), run_as=sys.argv[1],
                 gpu=GpuFacts(name="x", memory_bytes=1, num_sms=1, capability=(9, 0)), slice_dir="/x")
try:
    run_script(spec)
except Exception as error:
    print(script_traceback(error), end="")
    sys.exit(f"{type(error).__name__}: {error}")
"""


def run(cwd, *words, check=True):
    done = subprocess.run([sys.executable, "-P", "-c", RUN, *words], cwd=cwd, capture_output=True, text=True)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def plainly(cwd, *words):
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def place(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "show.py").write_text(SHOW)
    (package / "__main__.py").write_text(SHOW)
    return tmp_path


@pytest.mark.parametrize(
    ("run_as", "target", "plain"),
    [
        ("script", "sub/show.py", ["sub/show.py"]),
        ("module", "pkg.show", ["-m", "pkg.show"]),
        ("module", "pkg", ["-m", "pkg"]),
    ],
)
def test_as_python_does(place, run_as, target, plain):
    ours = json.loads(run(place, run_as, target, "--lr", "1").stdout)
    theirs = json.loads(plainly(place, *plain, "--lr", "1"))
    assert ours == theirs


def test_a_directory_with_a_main(place):
    out = json.loads(run(place, "script", "pkg").stdout)
    assert out["name"] == "__main__"


def test_the_traceback_begins_in_the_script(place):
    (place / "fails.py").write_text("def f():\n    raise ValueError('no')\nf()\n")
    done = run(place, "script", "fails.py", check=False)
    lines = done.stdout.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip() == f'File "{place}/fails.py", line 3, in <module>'
    assert "script.py" not in done.stdout
    done_module = run(place, "module", "pkg.nothing", check=False)
    assert "no module named pkg.nothing" in done_module.stderr


def test_a_syntax_error_shows_the_scripts_line_alone(place):
    (place / "typo.py").write_text("x = 1\ndef f(:\n")
    lines = run(place, "script", "typo.py", check=False).stdout.splitlines()
    assert lines[0].strip() == f'File "{place}/typo.py", line 2'
    assert lines[-1] == "SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("run_as", "target", "said"),
    [
        ("script", "missing.py", "PrismError: script missing.py does not exist"),
        ("module", "missing", "PrismError: no module named missing"),
    ],
)
def test_what_does_not_exist(place, run_as, target, said):
    assert said in run(place, run_as, target, check=False).stderr


def test_an_import_error_of_the_module_itself_keeps_its_name(place):
    (place / "pkg" / "bad.py").write_text("import not_there\n")
    done = run(place, "module", "pkg.bad", check=False)
    assert "ModuleNotFoundError: No module named 'not_there'" in done.stderr
    assert str(Path("pkg") / "bad.py") in done.stdout
