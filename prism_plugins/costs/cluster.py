"""The described cluster: what GPU, what node, what network.

A description is a TOML file; the presets beside this module are such files, with the public source of each figure
in a comment. ``load_cluster`` takes the name of a preset or the path of a file.
"""

from __future__ import annotations

import difflib
import importlib.resources
import pathlib
import tomllib
from typing import Any, Literal

import msgspec

from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.files import read_text
from prism_plugins.program.slices import GpuFacts

DEFAULT_CLUSTER = "dgx-h100"
_MAX_BYTES = 1 << 20
"""More is no description (``/dev/zero``, a data set given by mistake)."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU."""

    name: str
    """As ``torch.cuda.get_device_name`` reports it."""
    memory_bytes: int
    """As CUDA reports it (``total_memory``), not the marketing figure."""
    num_sms: int
    capability: tuple[int, int]
    l2_bytes: int
    hbm_bytes_per_s: float
    """Peak HBM bandwidth of the data sheet."""
    peak_flops: dict[str, float]
    """Dense peak of the data sheet, FLOP/s, by torch dtype name; ``tf32`` for float32 GEMMs with TF32 allowed."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server."""

    num_gpus: int
    nvlink_bytes_per_s: float
    """Per GPU and direction, of the data sheet."""
    nvlink_latency_us: float
    """One hop as a ring step sees it."""
    nvls: bool
    """NVSwitch reduces and multicasts in the switch (NVLink SHARP)."""
    num_nics: int
    """Compute-fabric NICs; 0: the cluster is this one node."""
    pcie_bytes_per_s: float
    """Host to device and back, per GPU and direction, as pinned copies reach it."""
    nic_bytes_per_s: float = 0.0
    """Per NIC and direction, line rate. Needed where there are NICs."""
    nic_latency_us: float = 2.7
    """One hop between nodes as a ring step of NCCL's LL protocol sees it; 2.7 is NCCL's own figure for InfiniBand."""
    gpu_link: Literal["nvlink", "pcie"] = "nvlink"
    """What ``nvlink_bytes_per_s`` describes: NVLink, or the PCIe slot of a node without it."""
    nvlink_domain_gpus: int = 0
    """GPUs that one NVLink switch joins where they sit in several nodes (72 for NVL72); 0: ``num_gpus``."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes."""

    oversubscription: float = 1.0
    """Leaf-to-spine oversubscription: 2.0 halves what a NIC sees across nodes."""
    ll128: bool = True
    """Whether NCCL may use its LL128 protocol across nodes: the NICs have to write GPU memory in order (GPUDirect RDMA)."""


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast the training process issues work. Hosts differ widely: jobs of small kernels are bound by it.

    The three times are scaled to the CPU time that the slices of a job took (:mod:`prism_plugins.host_speed`); a
    description that gives one of them means them as they are.
    """

    from_slices: bool = True
    """Scale the times to what slices took."""
    slice_factor: float = 0.0
    """How many times as long as the machine of the slices the target's host takes for Python and torch's dispatcher. 0: what
    the host benchmark says, run here beside the slices and on the machine of the calibration."""
    op_us: float = 10.0
    """Per launched kernel: Python, dispatcher, autograd, the views around it. Eager PyTorch issues about 100,000 kernels per
    second on current servers."""
    view_us: float = 2.0
    """Per op that launches nothing."""
    comm_us: float = 25.0
    """Per c10d call."""
    loop_us: float = 2.3
    """Per view in a bare Python loop, without the framework's work around an op; times ``slice_factor``. Default: measured
    on the idle machine on which the package was made; a virtual machine with an H200 took 4.3 to 5.6."""
    dispatch_us: float = 0.0
    """A step of the host benchmark (:mod:`prism_plugins.host_benchmark`) in a process that trains there, with which the same in
    the slices is compared; 0: what the calibration says."""
    enqueue_us: dict[str, float] = {}
    """On top of the three times, by kind of call: kernels' host code and the driver. Given with ``dispatch_us``, or set by prism."""
    measured_in_slices: bool = False
    """The times are those of a job's slices; set by prism, not in a description, like the next three."""
    spread: float = 0.0
    """Half of what the middle two thirds of the slices' iterations span, relative to their median: one standard deviation."""
    stretch: float = 0.0
    """How many times their CPU time the slices' iterations took: above 1 where other work kept the machine busy."""
    source: str = ""
    """Where the times come from, for the report."""
    memory_bytes: int = 2_199_023_255_552
    """Of a node. Default: 2 TiB (NVIDIA DGX H100 data sheet: 2 TB)."""
    memory_bytes_per_s: float = 614.4e9
    """Peak bandwidth of a node's host memory, all sockets; its GPUs share it evenly. Default: two sockets with eight
    channels of DDR5-4800 (DGX H100 and H200: two Xeon 8480C). NVLink-C2C (Grace) is not modelled."""
    pageable_copy_fraction: float = 0.4
    """Speed of a copy between device and pageable host memory, of one with pinned memory: the driver copies through a
    staging buffer. NVIDIA, How to Optimize Data Transfers in CUDA C/C++ (2012): 2.3 against 5.8 GB/s."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster of equal nodes. Sizes in bytes, rates in bytes/s or FLOP/s, latencies in microseconds."""

    name: str
    gpu: Gpu
    node: Node
    fabric: Fabric = Fabric()
    host: Host = Host()

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node; rank ``r`` runs on node ``r // gpus_per_node``."""
        return self.node.num_gpus

    @property
    def gpus_per_domain(self) -> int:
        """GPUs that reach each other without the network."""
        return self.node.nvlink_domain_gpus or self.node.num_gpus

    def gpu_facts(self) -> GpuFacts:
        """What a slice's virtual device reports about itself."""
        return GpuFacts(
            name=self.gpu.name,
            memory_bytes=self.gpu.memory_bytes,
            num_sms=self.gpu.num_sms,
            capability=self.gpu.capability,
            l2_bytes=self.gpu.l2_bytes,
        )


_MAY_BE_ZERO = (
    "slice_factor",
    "dispatch_us",
    "spread",
    "stretch",
    "nvlink_latency_us",
    "nic_latency_us",
    "num_nics",
    "nic_bytes_per_s",
    "nvlink_domain_gpus",
)
"""Latencies of an ideal network; a node without a network; other counts and rates are positive."""
_MAX_US = 1e6
"""Longest latency or host time a description may give."""


def presets() -> tuple[str, ...]:
    """Names of the clusters that ship with the package."""
    return tuple(
        sorted(p.name.removesuffix(".toml") for p in _preset_dir().iterdir() if p.name.endswith(".toml"))
    )


def load_cluster(name_or_path: str = DEFAULT_CLUSTER) -> Cluster:
    """Load a preset by name, or a description from a TOML file.

    Raises:
        PrismError: no such preset or file; not TOML; a key that is missing, unknown, of the wrong type or not
            positive. The message names the file and the key.
    """
    text, source = cluster_text(name_or_path)
    return parse_cluster(text, source=source)


def cluster_text(name_or_path: str) -> tuple[str, str]:
    """The TOML of a preset or file, and how errors name it. Raises PrismError where there is none."""
    if name_or_path in presets():
        source = _preset_dir() / f"{name_or_path}.toml"
        return source.read_text(encoding="utf-8"), f"preset {name_or_path}"
    path = pathlib.Path(name_or_path)
    looks_like_path = path.suffix == ".toml" or path.exists() or len(path.parts) > 1
    if not looks_like_path:
        near = difflib.get_close_matches(name_or_path, presets(), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise PrismError(
            f"cluster '{name_or_path}': no such preset{hint}; presets are {', '.join(presets())}; "
            "or give the path of a .toml file"
        )
    try:
        return read_text(path, max_bytes=_MAX_BYTES), str(path)
    except FileFormatError as error:
        raise PrismError(f"cluster file {error}") from None


def parse_cluster(text: str, *, source: str) -> Cluster:
    """Parse a TOML description; ``source`` names it in errors. Raises PrismError as :func:`load_cluster`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PrismError(f"cluster {source}: not valid TOML: {error}") from error
    _check_keys(data, Cluster, where="", source=source)
    host = data.get("host")
    if isinstance(host, dict) and {"op_us", "view_us", "comm_us"} & host.keys():
        host.setdefault("from_slices", False)
    try:
        cluster = msgspec.convert(data, Cluster)
    except msgspec.ValidationError as error:
        raise PrismError(f"cluster {source}: {_readable(error)}") from error
    check_values(cluster, source=source)
    return cluster


def check_world(cluster: Cluster, world_size: int) -> None:
    """Raise PrismError when a job has more ranks than a cluster without a network has GPUs."""
    if not cluster.node.num_nics and world_size > cluster.gpus_per_domain:
        raise PrismError(
            f"cluster {cluster.name} is one node of {cluster.gpus_per_domain} GPUs without NICs (node.num_nics = 0); "
            f"a job of {world_size} ranks needs a cluster with a network"
        )


def _preset_dir() -> Any:
    return importlib.resources.files("prism_plugins.costs") / "clusters"


def _check_keys(data: dict[str, Any], struct: type[msgspec.Struct], *, where: str, source: str) -> None:
    fields = {f.encode_name: f for f in msgspec.structs.fields(struct)}
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean '{where}{near[0]}'?" if near else f"known keys: {', '.join(fields)}"
            raise PrismError(f"cluster {source}: unknown key '{where}{key}'; {hint}")
        kind = fields[key].type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            _check_keys(value, kind, where=f"{where}{key}.", source=source)
    for key, field in fields.items():
        if key not in data and field.required:
            raise PrismError(f"cluster {source}: key '{where}{key}' is missing")


def check_values(cluster: Cluster, *, source: str) -> None:
    """Raise PrismError for a figure that is not positive and finite; ``source`` names the cluster in the message."""
    for section in ("gpu", "node", "fabric", "host"):
        struct = getattr(cluster, section)
        for key in struct.__struct_fields__:
            value = getattr(struct, key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                smallest_ok = value >= 0 if key in _MAY_BE_ZERO else value > 0
                if not smallest_ok or value != value or value == float("inf"):
                    raise PrismError(
                        f"cluster {source}: key '{section}.{key}' must be a positive number, not {value}"
                    )
                if key.endswith("_us") and value > _MAX_US:
                    raise PrismError(
                        f"cluster {source}: key '{section}.{key}' is in microseconds and must be at most "
                        f"{_MAX_US:g}, not {value:g}"
                    )
    node = cluster.node
    if node.num_nics and not node.nic_bytes_per_s:
        raise PrismError(
            f"cluster {source}: key 'node.nic_bytes_per_s' must be a positive number where there are NICs "
            f"(num_nics = {node.num_nics})"
        )
    if node.nvlink_domain_gpus and (node.gpu_link != "nvlink" or node.nvlink_domain_gpus % node.num_gpus):
        raise PrismError(
            f"cluster {source}: key 'node.nvlink_domain_gpus' ({node.nvlink_domain_gpus}) must be a multiple of "
            f"node.num_gpus ({node.num_gpus}) joined by NVLink"
        )
    for dtype, flops in cluster.gpu.peak_flops.items():
        if not 0 < flops < float("inf"):
            raise PrismError(
                f"cluster {source}: key 'gpu.peak_flops.{dtype}' must be a positive number, not {flops}"
            )
    if "bfloat16" not in cluster.gpu.peak_flops and "float16" not in cluster.gpu.peak_flops:
        raise PrismError(f"cluster {source}: key 'gpu.peak_flops.bfloat16' is missing")


def _readable(error: msgspec.ValidationError) -> str:
    """``Expected `int`, got `str` - at `$.gpu.num_sms``` → ``key 'gpu.num_sms': expected int, got str``."""
    what, _, where = str(error).partition(" - at ")
    key = where.strip("`").removeprefix("$.")
    what = what.replace("`", "")
    return f"key '{key}': {what[:1].lower()}{what[1:]}" if key else what
