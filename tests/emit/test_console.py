"""The summary: what must be in it, and that it stays plain text away from a terminal."""

import io
import re

import msgspec
from rich.console import Console

from prism_plugins.emit.console import gib, make_console, print_summary
from prism_plugins.program.prediction import Audit, Finding, Opportunity


def shown(prediction, **fields):
    file = io.StringIO()
    print_summary(msgspec.structs.replace(prediction, **fields), files=[("prediction", "out/prediction.json")],
                  console=make_console(file))  # fmt: skip
    return file.getvalue()


def line_of(text, label):
    return next(line for line in text.splitlines() if line.startswith(label))


def test_headline_figures_have_units(prediction):
    text = shown(prediction)
    assert "fits" in line_of(text, "Verdict")
    assert "61.0 GiB of 80.0 GiB (76.2 %)" in line_of(text, "Verdict")
    speed = line_of(text, "Iteration")
    assert "1,234.5 ms" in speed
    assert "3,457 tokens/s/GPU" in speed
    assert "412.3 TFLOP/s/GPU" in speed
    assert re.search(r"compute +800\.0 ms +64\.8 %", text)
    assert "1 from the cache" in text
    assert "2 sliced, 62 derived" in text
    assert "balanced routing" in text
    assert "out/prediction.json" in text
    assert "3 values the script read back were synthesized" in text.replace("\n", " ")


def test_samples_where_the_script_counts_no_tokens(prediction):
    speed = line_of(shown(prediction, tokens_per_s_per_gpu=None, samples_per_s=2428.457), "Iteration")
    assert "2,428.5 samples/s" in speed
    assert "samples/s" not in line_of(shown(prediction, samples_per_s=2428.457), "Iteration")


def test_small_sizes_keep_their_digits():
    sizes = (0, 4608, 2**20, 64 * 2**20, 2**28, 23 * 2**30)
    assert [gib(n) for n in sizes] == ["0.00 GiB", "0.0 MiB", "1.0 MiB", "64.0 MiB", "0.25 GiB", "23.0 GiB"]


def test_no_escape_codes_away_from_a_terminal(prediction):
    assert "\x1b" not in shown(prediction)


def test_colour_on_a_terminal(prediction):
    file = io.StringIO()
    print_summary(prediction, files=[], console=Console(file=file, force_terminal=True, width=100))
    assert "\x1b[" in file.getvalue()


def test_out_of_memory_names_the_ranks(prediction):
    over = msgspec.structs.replace(prediction.memory[0], device_used_bytes=85 * 2**30)
    finding = Finding(kind="oom", severity="error", ranks="0,32", phase="backward", message="needs 85.0 GiB")
    gain = Opportunity(what="norms", advice="fuse", gain_ms=1.0, method="re-simulated")
    text = shown(prediction, memory=(over, prediction.memory[1]), findings=(finding,), opportunities=(gain,))
    assert "memory: it does not fit" in line_of(text, "Fix first")
    verdict = line_of(text, "Verdict")
    assert "out of memory on ranks 0,32" in verdict
    assert "fits" not in verdict
    assert "106.2 %" in verdict


def test_little_room_is_said(prediction):
    finding = Finding(kind="oom", severity="warning", ranks="0,32", phase="backward", message="hardly fits")
    assert "fits, but hardly, on ranks 0,32" in line_of(shown(prediction, findings=(finding,)), "Verdict")


def test_a_hang_is_the_verdict(prediction):
    finding = Finding(
        kind="hang", severity="error", ranks="0-7", phase="forward mb 0", message="waits for 8-15"
    )
    text = shown(prediction, findings=(finding,), iteration_time_ms=0.0, slowest_rank=-1)
    assert "does not run: hang on ranks 0-7" in line_of(text, "Verdict")
    assert "waits for 8-15" in line_of(text, "Findings")
    assert "not predicted" in line_of(text, "Iteration")
    assert "not predicted" in line_of(text, "Time")


def test_unpriced_ops_and_a_failed_audit_are_named(prediction):
    text = shown(
        prediction, unpriced_ops={"aten::foo": 12, "aten::bar": 3}, audit=Audit(ranks=(9, 17), matched=1)
    )
    assert "15 occurrences of 2 ops" in text
    assert "aten::foo (12)" in text
    assert "1 of 2 match (ranks 9,17)" in line_of(text, "Audit")


def test_long_lists_say_how_much_is_left_out(prediction):
    text = shown(prediction, assumptions=tuple(f"assumption {i}" for i in range(30)))
    assert "assumption 11" in text
    assert "assumption 12" not in text
    assert "and 18 more in prediction.json" in text


def test_the_structure_is_fixed(prediction):
    labels = ["Job", "Verdict", "Iteration", "Time", "Memory", "Ranks", "Audit", "Findings", "Not priced", "Synthesized",
              "Assumed", "Files"]  # fmt: skip
    bare = shown(prediction, memory=(), assumptions=(), classes=(), slices=())
    for text in (shown(prediction), bare):
        found = [line.split("  ")[0] for line in text.splitlines() if line[:1].isupper()]
        assert found == labels
