"""Random jobs with symmetric classes, and the same jobs with every rank on its own."""

from __future__ import annotations

import numpy as np
from builders import Builder, collective, message

from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EventFlag
from prism_plugins.world.layout import Layout


def random_job(
    rng: np.random.Generator, *, layout: Layout, num_actions: int = 30, shards: bool = False
) -> JobPrograms:
    """A class per (stage, tp 0 or not): own kernels, one communication skeleton; with ``shards`` an optimizer tail that
    differs from one data-parallel rank to the next."""
    skeleton = [_action(rng, layout) for _ in range(num_actions)]
    tail = [_action(rng, layout, pipeline=False) for _ in range(4)]
    classes = []
    for stage in range(layout.pp):
        for tps in ((0,), tuple(range(1, layout.tp))):
            if not tps:
                continue
            ranks = np.array(
                sorted(
                    layout.rank_of({"tp": tp, "cp": 0, "ep": 0, "dp": dp, "pp": stage})
                    for tp in tps
                    for dp in range(layout.dp)
                )
            )
            seed = int(rng.integers(1 << 30))
            exemplar = _program(layout, int(ranks[0]), skeleton, tail, seed=seed, shard=0)
            variants, variant_of = {}, {}
            if shards:
                for rank in ranks.tolist():
                    dp = layout.coords(rank)["dp"]
                    if dp:
                        variant_of[rank] = dp
                        if dp not in variants:
                            variants[dp] = _program(layout, rank, skeleton, tail, seed=seed, shard=dp)
            classes.append(
                RankClass(
                    name=f"stage {stage} tp {tps}",
                    ranks=ranks,
                    representative=int(ranks[0]),
                    exemplar=exemplar,
                    variants=variants,
                    variant_of=variant_of,
                )
            )
    return JobPrograms(layout=layout, classes=tuple(classes))


def every_rank_alone(job: JobPrograms) -> JobPrograms:
    """The same job without any symmetry."""
    classes = tuple(
        RankClass(name=f"rank {r}", ranks=np.array([r]), representative=r, exemplar=program_of(job, r))
        for r in range(job.layout.world_size)
    )
    return JobPrograms(layout=job.layout, classes=classes)


def _action(rng: np.random.Generator, layout: Layout, *, pipeline: bool = True) -> tuple:
    kinds = ["tp", "tp", "tp", "dp", "dp", "world", "kernels", "kernels", "sync"]
    if pipeline and layout.pp > 1:
        kinds += ["pipe", "pipe", "pipe"]
    kind = rng.choice(kinds)
    return (
        str(kind),
        int(rng.integers(1, 3000)),
        bool(rng.random() < 0.4),
        int(rng.integers(max(1, layout.pp - 1))),
        int(rng.integers(1 << 30)),
    )


def _program(layout: Layout, rank: int, skeleton: list, tail: list, *, seed: int, shard: int):
    rng = np.random.default_rng(seed)
    b = Builder(rank)
    coords = layout.coords(rank)
    groups = {
        axis: b.group(
            tuple(layout.rank_of({**coords, axis: i}) for i in range(getattr(layout, axis))), axis.upper()
        )
        for axis in ("tp", "pp", "dp")
    }
    groups["world"] = b.group(tuple(range(layout.world_size)), "WORLD")
    pending: list[int] = []

    def play(actions: list, extra: int) -> None:
        for kind, size, is_async, stage, salt in actions:
            for _ in range(int(rng.integers(0, 4)) + extra):
                b.kernel(
                    float(rng.integers(10, 4000)),
                    stream=int(rng.integers(2)),
                    host=float(rng.integers(10, 900)),
                )
            local = np.random.default_rng([salt, coords["pp"]])
            if kind in groups:
                pending.append(b.comm(collective(groups[kind], size), is_async=is_async))
            elif kind == "pipe" and coords["pp"] in (stage, stage + 1):
                sends = coords["pp"] == stage
                peer = stage + 1 if sends else stage
                parts = [message("send" if sends else "recv", groups["pp"], peer, size)]
                if salt % 2:
                    parts.append(message("recv" if sends else "send", groups["pp"], peer, size + 7))
                pending.append(b.comm(*parts, is_async=is_async))
            elif kind == "sync" and local.random() < 0.5:
                b.device_sync() if salt % 2 else b.sync(stream=0)
            if pending and local.random() < 0.5:
                b.wait(pending.pop(0))

    play(skeleton, 0)
    b.begin("optimizer")
    play(tail, shard)
    b.end()
    assert EventFlag.ASYNC
    return b.program()
