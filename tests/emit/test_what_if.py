"""``prism what-if`` and ``prism cluster``."""

from __future__ import annotations

import json

import msgspec
import pytest

from prism_plugins.cli import main
from prism_plugins.cli_cluster import source_comments
from prism_plugins.costs.cluster import load_cluster, presets


def printed(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_the_other_cluster_beside_the_first(run, capsys):
    before = run.prediction.read_bytes()
    text = printed(capsys, "what-if", "latest", "--cluster", "dgx-b200")
    assert "dgx-b200" in text.splitlines()[0]
    assert "iteration" in text
    assert "178.3 GiB" in text
    assert "what a script decides by the kind of GPU is as it was there" in text
    assert run.prediction.read_bytes() == before


def test_faster_gpus_and_links_are_faster_and_capacity_is_theirs(run, capsys, tmp_path):
    def of(cluster: str) -> dict:
        return json.loads(printed(capsys, "what-if", "latest", "--cluster", cluster, "--json"))

    slow, fast = of("dgx-a100"), of("dgx-b200")
    assert fast["breakdown_ms"]["compute"] < 0.7 * slow["breakdown_ms"]["compute"]
    assert slow["cluster"] == "dgx-a100"
    memory = slow["memory"][0]
    assert memory["capacity_bytes"] == load_cluster("dgx-a100").gpu.memory_bytes
    assert memory["device_used_bytes"] == memory["peak_reserved_bytes"] + sum(
        memory["outside_torch"].values()
    )
    out = tmp_path / "there.json"
    printed(capsys, "what-if", "latest", "--cluster", "dgx-b200", "--out", str(out))
    assert json.loads(out.read_text())["iteration_time_ms"] == pytest.approx(fast["iteration_time_ms"])


def test_too_small_a_gpu_is_out_of_memory(run, capsys, tmp_path):
    text = printed(capsys, "cluster", "show", "dgx-h100", "--toml")
    small = tmp_path / "small.toml"
    small.write_text(text.replace("memory_bytes = 85_027_979_264", "memory_bytes = 20_000_000"))
    text = printed(capsys, "what-if", "latest", "--cluster", str(small))
    assert "error: out of memory" in text
    assert next(line for line in text.splitlines() if line.startswith("fits")).split() == [
        "fits",
        "yes",
        "no",
    ]


def test_a_run_of_another_version_is_priced_again_on_both(run, capsys):
    info = run.read_info()
    run.write_info(msgspec.structs.replace(info, prism_version="0.0.1", cluster=load_cluster("dgx-b200")))
    text = printed(capsys, "what-if", "latest", "--cluster", "dgx-b200")
    assert next(line for line in text.splitlines() if line.startswith("iteration")).split()[-1] == "1.000"


def test_nccl_variables_of_the_launch_are_kept_with_the_run(run, capsys):
    run.write_info(msgspec.structs.replace(run.read_info(), nccl_variables={"NCCL_ALGO": "Ring"}))
    text = printed(capsys, "what-if", "latest", "--cluster", "dgx-b200", "--json")
    assert "NCCL and CUDA variables of the launch: NCCL_ALGO=Ring" in json.loads(text)["assumptions"]


def test_refusals(run, capsys):
    assert "no such preset" in refused(capsys, "what-if", "latest", "--cluster", "dgx-z9")
    assert "without NICs" in refused(capsys, "what-if", "latest", "--cluster", "h200x1")
    assert "is not a run directory" in refused(
        capsys, "what-if", str(run.path.parent), "--cluster", "dgx-b200"
    )


def test_cluster_list_has_every_preset(capsys):
    text = printed(capsys, "cluster", "list")
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(presets())


@pytest.mark.parametrize("name", presets())
def test_cluster_show_gives_units_and_a_source_for_every_given_figure(name, capsys):
    text = printed(capsys, "cluster", "show", name)
    assert "GB/s" in text
    assert "GiB" in text
    toml = printed(capsys, "cluster", "show", name, "--toml")
    comments = source_comments(toml)
    for key in (
        "gpu.memory_bytes",
        "gpu.hbm_bytes_per_s",
        "gpu.peak_flops.float32",
        "node.nvlink_bytes_per_s",
    ):
        assert comments[key], key
    shown = json.loads(printed(capsys, "cluster", "show", name, "--json"))
    assert shown["host"]["op_us"] == load_cluster(name).host.op_us


def test_cluster_show_checks_a_file(capsys, tmp_path):
    mine = tmp_path / "mine.toml"
    toml = printed(capsys, "cluster", "show", "dgx-h100", "--toml")
    mine.write_text(toml.replace("nvlink_bytes_per_s = 450e9", "nvlink_bytes_per_s = 0"))
    message = refused(capsys, "cluster", "show", str(mine))
    assert "key 'node.nvlink_bytes_per_s' must be a positive number, not 0" in message
    assert message.count("\n") == 1
