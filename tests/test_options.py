"""Flags, environment twins, and the one line for everything that is wrong with them."""

import os
import subprocess
import sys

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.options import TABLE, Options, parse_command, parse_ranks


def parse(text, **environ):
    return parse_command(text.split(), environ)


def test_flags_are_taken_out_wherever_they_stand():
    job = parse("--prism-world-size 64 train.py --lr 0.1 --prism-emulate --x --prism-audit=4 last")
    assert job.argv == ("train.py", "--lr", "0.1", "--x", "last")
    assert job.run_as == "script"
    assert (job.options.world_size, job.options.audit) == (64, 4)


def test_modules():
    job = parse("-m pkg.train --prism-world-size 2 -m x")
    assert (job.run_as, job.argv) == ("module", ("pkg.train", "-m", "x"))


def test_defaults():
    options = parse("t.py --prism-world-size 8").options
    assert options == Options(world_size=8, jobs=options.jobs)
    assert options.jobs >= 1
    assert options.device == "virtual"


def test_environment_twins_and_precedence():
    job = parse(
        "t.py --prism-world-size 8",
        PRISM_WORLD_SIZE="16",
        PRISM_STRICT="1",
        PRISM_NO_CACHE="true",
        PRISM_RANKS="0,2-3",
        PRISM_OUT="x",
        PRISM_JOBS="3",
        PRISM_CLUSTER="dgx-a100",
        PRISM_DEVICE="cpu",
        PRISM_ITERATIONS="7",
        PRISM_AUDIT="2",
        PRISM_MOE_LOAD="zipf:1.50",
    )
    assert job.options == Options(
        world_size=8,
        cluster="dgx-a100",
        device="cpu",
        ranks=(0, 2, 3),
        iterations=7,
        audit=2,
        strict=True,
        out="x",
        jobs=3,
        cache=False,
        moe_load="zipf:1.5",
    )


def test_jobs_default_shares_the_cores_between_launched_processes():
    alone = parse("t.py --prism-world-size 8").options.jobs
    shared = parse("t.py --prism-world-size 8", LOCAL_WORLD_SIZE="2").options.jobs
    assert shared == max(1, alone // 2)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("t.py", "--prism-world-size is missing"),
        ("t.py --prism-world-size 0", "--prism-world-size must be between 1 and"),
        ("t.py --prism-world-size -8", "not -8"),
        ("t.py --prism-world-size abc", "expects a whole number, not 'abc'"),
        ("t.py --prism-world-size", "--prism-world-size needs a value"),
        ("t.py --prism-world-size --prism-strict", "--prism-world-size needs a value"),
        ("t.py --prism-world-size=", "expects a whole number, not ''"),
        ("t.py --prism-wordl-size 8", "unknown flag --prism-wordl-size; did you mean --prism-world-size?"),
        ("t.py --prism-world-size 8 --prism-strict=1", "--prism-strict takes no value"),
        ("t.py --prism-world-size 8 --prism-device gpu", "must be one of auto, virtual, cuda, cpu"),
        ("t.py --prism-world-size 8 --prism-gpu-memory 80GiB", "needs a real GPU: --prism-device cuda"),
        ("t.py --prism-world-size 8 --prism-device cpu --prism-replay 0", "not on cpu"),
        (
            "t.py --prism-world-size 8 --prism-device cuda --prism-gpu-memory lots",
            "expects a size such as 80GiB",
        ),
        ("t.py --prism-world-size 8 --prism-device cuda --prism-replay 8", "names rank 8"),
        ("t.py --prism-world-size 8 --prism-ranks 8", "--prism-ranks names rank 8, but the world size is 8"),
        ("t.py --prism-world-size 8 --prism-ranks 5-3", "empty range"),
        ("t.py --prism-world-size 8 --prism-ranks 1,x", "expects ranks such as 0,5-9"),
        ("t.py --prism-world-size 8 --prism-audit 8", "must be less than the world size"),
        ("t.py --prism-world-size 8 --prism-iterations 0", "between 1 and 1000"),
        ("t.py --prism-world-size 8 --prism-jobs 0", "--prism-jobs must be between"),
        ("--prism-world-size 8", "no script given"),
    ],
)
def test_mistakes_are_one_line(command, said):
    with pytest.raises(PrismError) as caught:
        parse(command)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_utf8_is_named():
    with pytest.raises(PrismError, match=r"b'\\xff.py' on the command line is not UTF-8"):
        parse_command(["\udcff.py", "--prism-world-size", "8"], {})
    assert parse_command(["ü \n.py", "--prism-world-size", "8"], {}).argv == ("ü \n.py",)


def test_the_last_of_a_repeated_flag_counts():
    assert parse("t.py --prism-world-size 4 --prism-world-size=8").options.world_size == 8


def test_a_mistake_in_the_environment_names_the_variable():
    with pytest.raises(PrismError, match="PRISM_WORLD_SIZE expects a whole number"):
        parse("t.py", PRISM_WORLD_SIZE="many")


def test_help_wins_over_everything_else():
    assert parse("t.py --prism-help") is None
    assert parse("--help") is None
    assert parse("-h --prism-emulate") is None
    assert parse("t.py --help --prism-world-size 8").argv == ("t.py", "--help")


def test_an_option_in_the_place_of_the_script_is_named():
    with pytest.raises(PrismError, match="--lr stands where the script belongs"):
        parse("--lr 1 t.py --prism-world-size 8")


def test_ranks():
    assert parse_ranks("0,5-9,2", world_size=16) == (0, 2, 5, 6, 7, 8, 9)
    assert parse_ranks("all", world_size=4) == (0, 1, 2, 3)
    assert parse("t.py --prism-world-size 4 --prism-ranks all").options.all_ranks


def test_every_flag_and_its_twin_are_in_the_help():
    out = subprocess.run(
        [sys.executable, "-m", "prism_plugins.run", "--prism-help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for option in TABLE:
        assert option.flag in out.stdout
        assert option.name == "help" or option.env in out.stdout
        assert option.default in out.stdout or option.default in ("off", "required")
    assert "\x1b" not in out.stdout
    assert max(map(len, out.stdout.splitlines())) < 130


def test_mistakes_end_with_status_2_and_nothing_run(tmp_path):
    script = tmp_path / "t.py"
    script.write_text("raise SystemExit('it ran')")
    done = subprocess.run(
        [sys.executable, "-m", "prism_plugins.run", str(script), "--prism-world-size", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("prism: error: --prism-world-size must be between 1 and")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [script]


def test_the_calibration_is_found_from_anywhere():
    words = ["--prism-emulate", "--prism-world-size", "2", "--prism-calibration"]
    assert parse_command([*words, "c.json", "train.py"], {}).options.calibration == os.path.abspath("c.json")
    assert parse_command([*words, "none", "train.py"], {}).options.calibration == "none"
