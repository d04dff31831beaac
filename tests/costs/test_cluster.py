"""Cluster descriptions: presets, files, and what is said about mistakes in them."""

from __future__ import annotations

import importlib.resources

import pytest

from prism_plugins.costs.cluster import DEFAULT_CLUSTER, check_world, load_cluster, parse_cluster, presets
from prism_plugins.errors import PrismError

PRESET_DIR = importlib.resources.files("prism_plugins.costs") / "clusters"


def preset_text(name: str = "dgx-h100") -> str:
    return (PRESET_DIR / f"{name}.toml").read_text()


@pytest.mark.parametrize("name", presets())
def test_presets_load_and_name_themselves(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.gpus_per_node in (1, 2, 4, 8)
    facts = cluster.gpu_facts()
    assert 79 * 2**30 < facts.memory_bytes < 192e9
    assert cluster.gpu.peak_flops["bfloat16"] > 3e14


def test_the_presets_and_the_default_exist() -> None:
    wanted = (
        "dgx-a100 dgx-h100 dgx-h200 hgx-h800 dgx-b200 gb200-nvl72 aws-p5 gcp-a3-mega h100x1 h200x1 h200x2"
    )
    assert set(wanted.split()) <= set(presets())
    assert load_cluster().name == DEFAULT_CLUSTER


def test_an_unknown_preset_lists_the_presets_and_the_nearest() -> None:
    with pytest.raises(
        PrismError, match=r"dgx-h10.*did you mean dgx-h100.*dgx-a100, dgx-b200, dgx-h100, dgx-h200"
    ):
        load_cluster("dgx-h10")


def test_a_file_is_loaded_by_path(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(preset_text().replace("num_gpus = 8", "num_gpus = 4") + "\n[host]\nop_us = 40\n")
    cluster = load_cluster(str(path))
    assert cluster.gpus_per_node == 4
    assert cluster.host.op_us == 40
    assert cluster.host.comm_us == 25


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(PrismError, match=r"nowhere\.toml"):
        load_cluster(str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("num_sms", "num_smss"), r"unknown key 'gpu\.num_smss'; did you mean 'gpu\.num_sms'"),
        (("num_nics = 8", ""), r"key 'node\.num_nics' is missing"),
        (
            ("nic_bytes_per_s = 50e9", ""),
            r"'node\.nic_bytes_per_s' must be a positive number where there are NICs",
        ),
        (
            ("nic_bytes_per_s = 50e9", "nic_bytes_per_s = 0"),
            r"'node\.nic_bytes_per_s' must be a positive number",
        ),
        (
            ("nvlink_bytes_per_s = 450e9", "nvlink_bytes_per_s = 0"),
            r"'node\.nvlink_bytes_per_s' must be a positive",
        ),
        (
            ("nvls = true", 'nvls = true\ngpu_link = "copper"'),
            r"key 'node\.gpu_link': invalid enum value 'copper'",
        ),
        (
            ("nvls = true", "nvls = true\nnvlink_domain_gpus = 12"),
            r"'node\.nvlink_domain_gpus' \(12\) must be a multiple",
        ),
        (("num_nics = 8", "num_nics = -1"), r"'node\.num_nics' must be a positive"),
        (("nvls = true", "nvls = 3"), r"key 'node\.nvls': expected bool"),
        (("num_sms = 132", 'num_sms = "many"'), r"key 'gpu\.num_sms': expected int"),
        (("num_sms = 132", "num_sms = 132 132"), "not valid TOML"),
        (("bfloat16 = 989.4e12", "bfloat16 = -1"), r"'gpu\.peak_flops\.bfloat16' must be a positive"),
        (
            ("oversubscription = 1.0", "oversubscription = nan"),
            r"'fabric\.oversubscription' must be a positive",
        ),
        (("[fabric]", "[fabrik]"), r"unknown key 'fabrik'; did you mean 'fabric'"),
    ],
)
def test_mistakes_name_the_key_and_the_file(change: tuple[str, str], says: str) -> None:
    text = preset_text().replace(*change, 1)
    assert text != preset_text()
    with pytest.raises(PrismError, match=says) as caught:
        parse_cluster(text, source="mine.toml")
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value).split("not valid TOML")[0]


def test_a_node_without_nics_holds_no_larger_job() -> None:
    cluster = load_cluster("h200x2")
    check_world(cluster, 2)
    check_world(load_cluster("dgx-h200"), 1024)
    with pytest.raises(PrismError, match=r"h200x2 is one node of 2 GPUs without NICs.*a job of 4 ranks"):
        check_world(cluster, 4)


def test_a_rack_of_trays_is_one_nvlink_domain() -> None:
    rack = load_cluster("gb200-nvl72")
    assert (rack.gpus_per_node, rack.gpus_per_domain) == (4, 72)


def test_every_figure_of_a_preset_has_a_source() -> None:
    for name in presets():
        lines = preset_text(name).splitlines()
        for i, line in enumerate(lines):
            if "bytes_per_s" in line:
                assert "#" in line or any("#" in above for above in lines[max(0, i - 3) : i]), (name, line)
