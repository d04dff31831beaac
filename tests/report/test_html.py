"""The report: complete, self-contained, escaped, and rendered by a browser."""

import re
import shutil
import subprocess

import msgspec
import pytest

from prism_plugins import cli
from prism_plugins.emit.prediction_json import read_prediction, write_prediction
from prism_plugins.program.prediction import Finding
from prism_plugins.report.html import render, write_report
from prism_plugins.report.insight import with_insight

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</title></svg></style><script>document.title='owned'</script><img src=http://example.com/x>\"'&"


@pytest.fixture
def hostile(run, view, insight):
    """A report whose every text was chosen by an enemy."""
    prediction = with_insight(read_prediction(run.prediction), view, insight)
    classes = tuple(msgspec.structs.replace(c, name=HOSTILE, ranks="0-7") for c in prediction.classes)
    memory = tuple(
        msgspec.structs.replace(m, name=HOSTILE, peak_phase=HOSTILE, by_category={HOSTILE: 1 << 30})
        for m in prediction.memory
    )
    finding = Finding(kind=HOSTILE, severity=HOSTILE, ranks="0", phase=HOSTILE, message=HOSTILE)
    prediction = msgspec.structs.replace(
        prediction, classes=classes, memory=memory, findings=(finding,), assumptions=(HOSTILE,),
        unpriced_ops={HOSTILE: 3}, cluster=HOSTILE, framework=HOSTILE,
    )  # fmt: skip
    path = run.path / "report.html"
    write_report(path, prediction, title=HOSTILE, view=view, insight=insight, others={HOSTILE: prediction})
    return path


def test_hostile_texts_stay_texts(hostile):
    text = hostile.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("<svg") == text.count("</svg>") > 4
    assert "&lt;script&gt;" in text


def test_nothing_is_loaded(hostile):
    text = re.sub(r">[^<]*<", "><", hostile.read_text())  # markup alone
    assert "default-src 'none'" in text
    assert not re.search(r"\b(src|href)=\"(?!#)", text)
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_every_section(hostile, tmp_path):
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    dom = subprocess.run(
        [*command, "--dump-dom", hostile.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "owned" not in dom.partition("</title>")[0].rpartition("<title>")[2].replace("'owned'", "")
    assert "<script" not in dom
    for section in ("pipeline", "path", "memory", "communication", "ops", "findings", "what-if", "trust"):
        assert f'id="{section}"' in dom
    picture = tmp_path / "report.png"
    subprocess.run(
        [*command, "--window-size=1280,1600", f"--screenshot={picture}", hostile.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert picture.stat().st_size > 20_000


def test_what_the_report_says(run, view, insight):
    prediction = with_insight(read_prediction(run.prediction), view, insight)
    text = render(prediction, title="train.py", view=view, insight=insight, cluster=None, others={})
    bars = re.findall(r'class="bar (fwd|bwd|opt|sync|misc)"[^>]*><title>', text)
    layout = view.job.layout
    assert min(bars.count("fwd"), bars.count("bwd")) >= layout.pp * layout.num_microbatches
    assert bars.count("opt") >= layout.pp
    for opportunity in prediction.opportunities:
        assert opportunity.what in text
    assert "1,234.5 ms" in text


def test_a_job_that_does_not_run_has_a_report_too(run):
    prediction = msgspec.structs.replace(
        read_prediction(run.prediction), iteration_time_ms=0.0, tokens_per_s_per_gpu=None, tflops_per_gpu=None,
        findings=(Finding(kind="hang", severity="error", ranks="0-7", message="rank 3 never came"),),
    )  # fmt: skip
    text = render(prediction, title="t", view=None, insight=None, cluster=None, others={})
    assert "does not run: hang" in text
    assert "rank 3 never came" in text
    assert 'id="pipeline"' not in text


class TestCommand:
    def test_writes_the_report(self, run, capsys):
        assert cli.main(["report"]) == 0
        assert capsys.readouterr().out.strip().endswith("report.html")
        assert "<svg" in run.report.read_text()

    def test_side_by_side(self, run, capsys, tmp_path):
        other = tmp_path / "other.json"
        prediction = read_prediction(run.prediction)
        write_prediction(
            other, msgspec.structs.replace(prediction, cluster="dgx-b200", iteration_time_ms=617.25)
        )
        out = tmp_path / "both.html"
        assert cli.main(["report", "latest", "--with", str(other), "--out", str(out)]) == 0
        text = out.read_text()
        assert "dgx-b200 (other)" in text
        assert "× 0.500" in text
        assert not run.report.exists()

    @pytest.mark.parametrize("content", ["", "{", '{"schema": 999}', "[1]"])
    def test_broken_other(self, run, capsys, tmp_path, content):
        other = tmp_path / "other.json"
        other.write_text(content)
        assert cli.main(["report", "latest", "--with", str(other)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not run.report.exists()
