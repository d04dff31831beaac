"""``prism flight-recorder``."""

from __future__ import annotations

from prism_plugins.cli import main


def test_a_dump_for_every_rank(run, capsys, tmp_path):
    out = tmp_path / "dumps"
    assert main(("flight-recorder", "latest", "--out", str(out))) == 0
    text = capsys.readouterr().out
    files = sorted(p.name for p in out.iterdir())
    assert f"{len(files)} dumps in {out}" in text
    assert files[0] == "rank_0"
