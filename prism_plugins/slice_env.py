"""The environment of a slice: what torchrun would give the target rank, and nothing of the physical launch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from prism_plugins.autoload import SLICE_MARKER
from prism_plugins.options import TABLE
from prism_plugins.program.slices import SliceSpec

_OF_THE_LAUNCH = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_")
"""Prefixes of variables from which scripts may derive a rank of the physical launch."""

HASH_SEED_CHOSEN = "PRISM_HASH_SEED"
"""Set where Python's hash seed is prism's choice: the target job leaves it to chance on every rank."""

_RANK_OF_SCHEDULERS = {
    "rank": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "world": ("SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local_rank": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "per_node": ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE"),
    "node": ("SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK", "CROSS_RANK"),
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "CROSS_SIZE"),
}
"""Variables by which schedulers, MPI and DeepSpeed's launcher (the last ones) say who a process is. Where the physical
launch had one, the slice has it too, as the target job would."""


def slice_environment(spec: SliceSpec, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of the child process that runs ``spec``."""
    options = {option.env for option in TABLE}
    env = {k: v for k, v in base.items() if not k.startswith(_OF_THE_LAUNCH) and k not in options}
    per_node = min(spec.gpus_per_node, spec.world_size)
    node, local_rank = divmod(spec.rank, per_node)
    if spec.device == "cuda":
        local_rank = 0  # The only GPU that the slice sees.
    nodes = -(-spec.world_size // per_node)
    place = {
        "rank": spec.rank,
        "world": spec.world_size,
        "local_rank": local_rank,
        "per_node": per_node,
        "node": node,
        "nodes": nodes,
    }
    for what, names in _RANK_OF_SCHEDULERS.items():
        env |= {name: str(place[what]) for name in names if name in base}
    if spec.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = physical_gpu(base)
    elif "CUDA_VISIBLE_DEVICES" in base:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(per_node)))
    host, _, port = (spec.store or base.get("MASTER_ADDR", "127.0.0.1") + ":").rpartition(":")
    env |= {
        SLICE_MARKER: str(spec.rank),
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(spec.rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port or base.get("MASTER_PORT", "29500"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "prism",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if base.get("PYTHONHASHSEED", "random") == "random":
        # Otherwise sets of strings would have another order in every slice.
        env |= {"PYTHONHASHSEED": "0", HASH_SEED_CHOSEN: "1"}
    # Inductor plans regions in a slice but compiles none: its pool of compiler processes would idle.
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return env


def physical_gpu(base: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a slice on a real GPU: the one of the physical rank that runs it."""
    local = base.get("LOCAL_RANK", "0")
    index = int(local) if local.isdecimal() else 0
    visible = [name.strip() for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[index % len(visible)] if visible else str(index)
