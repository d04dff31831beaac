"""Measured collectives: outputs of nccl-tests, how points correct the model, a small measurement over gloo."""

from __future__ import annotations

import pytest

from prism_plugins.cli import main
from prism_plugins.costs.calibration import Calibration, read_calibration
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.collectives import CollectiveModel
from prism_plugins.costs.model import build_cost_model
from prism_plugins.costs.nccl.measured import CollectivePoint, merge_points
from prism_plugins.costs.nccl.nccl_tests import parse_nccl_tests
from prism_plugins.errors import PrismError
from prism_plugins.program.model import CommSignature

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = """\
     1048576        262144     float     sum      -1    27.10   38.69   67.71      0    26.93   38.94   68.14      0
    67108864      16777216     float     sum      -1    330.2  203.24  355.67      0    324.7  206.68  361.69      0
  1073741824     268435456     float     sum      -1   4020.1  267.09  467.41      0   4016.4  267.34  467.84      0
"""


def output(
    rows: str = ROWS,
    *,
    program: str = "all_reduce_perf",
    ranks: int = 8,
    nodes: int = 1,
    header: str = HEADER,
) -> str:
    listed = "".join(
        f"#  Rank {r:2} Group  0 Pid {313 + r} on     node-{r * nodes // ranks} device {r % 8:2} [0x18] NVIDIA H100 80GB HBM3\n"
        for r in range(ranks)
    )
    return f"$ mpirun -np {ranks} ./build/{program} -b 1M -e 1G -f 2 -g 1\n# nThread 1 nGpus 1\n# Using devices\n{listed}{header}{rows}"


def test_a_table_as_it_is_printed() -> None:
    tests = parse_nccl_tests(output(), source="x")
    assert tests.gpu == "NVIDIA H100 80GB HBM3"
    assert [(p.nbytes, p.us) for p in tests.points] == [
        (1048576, 26.93),
        (67108864, 324.7),
        (1073741824, 4016.4),
    ]
    assert {(p.kind, p.gpus, p.nodes) for p in tests.points} == {("all_reduce", 8, 1)}


def test_out_of_place_counts_where_torch_calls_out_of_place_and_hosts_are_counted() -> None:
    rows = ROWS.replace("sum", "none")
    text = output(rows, program="all_gather_perf", ranks=16, nodes=2)
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in text.splitlines())
    for variant in (text, tagged):
        points = parse_nccl_tests(variant, source="x").points
        assert [p.us for p in points] == [27.10, 330.2, 4020.1]
        assert {(p.kind, p.gpus, p.nodes) for p in points} == {("all_gather", 16, 2)}


def test_older_tables_and_missing_checks() -> None:
    header = HEADER.replace("    root ", "").replace("#wrong", " error")
    rows = "  1048576  262144  float  sum  27.10  38.69  67.71  5e-07  26.93  38.94  68.14  N/A\n"
    assert parse_nccl_tests(output(rows, header=header), source="x").points[0].us == 26.93


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (output().replace("all_reduce_perf", "perf"), "names no program such as all_reduce_perf; say which"),
        (output() + "all_gather_perf", r"several programs \(all_gather, all_reduce\)"),
        (output(ranks=1), "fewer than two '# Rank' lines"),
        (output(""), "no line with figures"),
        (output(header=""), "line 12: figures before any header"),
        (output(header=HEADER.replace("algbw", "speed")), "line 13: the table lacks the column 'algbw'"),
        (output(ROWS + "  2147483648  536870912  float  sum\n"), "line 18: 4 columns, the header has more"),
        (output(ROWS.replace("361.69      0", "361.69     77")), "line 16: 77 wrong results"),
        (output(ROWS.replace("324.7", "N/A").replace("330.2", "-")), "line 16: no time in the column 'time'"),
        (output(ROWS.replace("26.93", "0.000")), "line 15: all_reduce of 1048576 bytes in 0.0 us"),
        (output(ROWS + "node-0: Test NCCL failure common.cu:958 'unhandled system error'"), "line 18: the test failed"),
    ],
)  # fmt: skip
def test_unusable_outputs_say_which_line(text: str, says: str) -> None:
    with pytest.raises(PrismError, match=says) as caught:
        parse_nccl_tests(text, source="out.txt")
    assert "out.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


def call(nbytes: int) -> CommSignature:
    n = nbytes // 4
    return CommSignature(kind="all_reduce", group=0, dtype="float32", in_numel=n, out_numel=n)


def test_points_correct_the_model_and_its_shape_carries_them_on() -> None:
    cluster = load_cluster("dgx-h100")
    plain = CollectiveModel(cluster)
    at = {n: plain.modelled_us("all_reduce", 8, 1, n) for n in (1 << 20, 1 << 30)}
    points = [
        CollectivePoint(kind="all_reduce", gpus=8, nbytes=1 << 20, us=2 * at[1 << 20]),
        CollectivePoint(kind="all_reduce", gpus=8, nbytes=1 << 30, us=0.5 * at[1 << 30]),
    ]
    measured = CollectiveModel(cluster, measured=points)

    def ratio(nbytes: int, ranks=tuple(range(8))) -> tuple[float, str]:
        a, b = (m.price(call(nbytes), ranks, 0) for m in (measured, plain))
        return a.duration_ns / b.duration_ns, a.provenance

    assert ratio(1 << 20) == (pytest.approx(2.0), "measured")
    assert ratio(1 << 25) == (pytest.approx(1.0), "measured")  # half way, in logarithms
    assert ratio(1 << 30) == (pytest.approx(0.5), "measured")
    assert ratio(1 << 34) == (pytest.approx(0.5), "scaled")
    assert ratio(1 << 30, (0, 1, 2, 3)) == (pytest.approx(0.5), "scaled")
    assert ratio(1 << 30, tuple(range(16))) == (1.0, "modelled")  # nothing across nodes was measured
    gather = CommSignature(kind="all_gather", group=0, dtype="float32", in_numel=8, out_numel=64)
    assert measured.price(gather, tuple(range(8)), 0) == plain.price(gather, tuple(range(8)), 0)
    assert any("measured points correct all_reduce" in line for line in measured.assumptions())


def test_group_sizes_are_interpolated_and_later_points_win() -> None:
    cluster = load_cluster("dgx-h100")
    plain = CollectiveModel(cluster)
    points = [
        CollectivePoint(
            kind="all_gather", gpus=n, nbytes=1 << 28, us=f * plain.modelled_us("all_gather", n, 1, 1 << 28)
        )
        for n, f in ((2, 4.0), (8, 1.0))
    ]
    model = CollectiveModel(cluster, measured=points)
    four = CommSignature(kind="all_gather", group=0, dtype="float32", in_numel=1 << 24, out_numel=1 << 26)
    ranks = (0, 1, 2, 3)
    ratio = model.price(four, ranks, 0).duration_ns / plain.price(four, ranks, 0).duration_ns
    assert ratio == pytest.approx(2.0)
    again = CollectivePoint(kind="all_gather", gpus=2, nbytes=1 << 28, us=1.0)
    assert merge_points([points, [again]])[0].us == 1.0


def test_the_command_reads_outputs_into_a_calibration(tmp_path, capsys) -> None:
    first, second, out = (tmp_path / name for name in ("ar.txt", "ag.txt", "nccl.json"))
    first.write_text(output())
    second.write_text(output(ROWS.replace("sum", "none"), program="unknown"))
    words = ["calibrate", "--nccl-tests", str(first), "--out", str(out)]
    assert main(words) == 0
    calibration = read_calibration(out)
    assert calibration.gpu == "NVIDIA H100 80GB HBM3"
    assert len(calibration.collectives) == 3
    assert main(["calibrate", "show", str(out)]) == 0
    assert "all_reduce of 8 GPUs: 3 sizes, 1,048,576 to 1,073,741,824 bytes" in capsys.readouterr().out
    assert main([*words, "--nccl-tests", str(second)]) == 2
    assert "say which collective it is" in capsys.readouterr().err
    out.write_text(out.read_text().replace('"us":26.93', '"us":-1'))
    assert main(["calibrate", "show", str(out)]) == 2
    assert "all_reduce of 1048576 bytes in -1.0 us" in capsys.readouterr().err


def test_a_calibration_brings_its_collectives_to_clusters_of_its_gpu_only() -> None:
    point = CollectivePoint(kind="all_reduce", gpus=8, nbytes=1 << 20, us=1000.0)
    calibration = Calibration(gpu="NVIDIA H100 80GB HBM3", collectives=[point])

    def us(cluster: str) -> float:
        costs = build_cost_model(load_cluster(cluster), calibration=calibration)
        return costs.price_comm(call(1 << 20), tuple(range(8)), 0).duration_ns / 1e3

    assert us("dgx-h100") == pytest.approx(1000.0)
    assert us("dgx-h200") < 100


@pytest.mark.e2e
def test_measuring_over_gloo_gives_points_of_every_kind() -> None:
    from prism_plugins.calibration.collectives import measure_collectives

    gpu, points = measure_collectives(device="cpu", gpus=2, most_bytes=1024, budget_s=60)
    assert gpu == "cpu"
    kinds = {p.kind for p in points}
    assert {"all_reduce", "all_gather", "broadcast", "p2p"} <= kinds
    assert {p.nbytes for p in points} == {1024}
    assert all(p.us > 0 and p.gpus == 2 for p in points)


def test_one_gpu_is_too_few() -> None:
    from prism_plugins.calibration.collectives import measure_collectives

    with pytest.raises(PrismError, match="collectives need two GPUs or more; this machine has 1"):
        measure_collectives(gpus=1)
