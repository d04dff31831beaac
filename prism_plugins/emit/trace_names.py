"""What Kineto calls things: kernels, collectives, dtypes. Tools that read traces match on these strings."""

from __future__ import annotations

from prism_plugins.emit.spans import memory_op_name
from prism_plugins.program.model import CommSignature, OpSignature, Phase

COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""Our kind → ``Collective name`` as ProcessGroupNCCL gives it to ``record_param_comms``."""

NCCL_FUNCTIONS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "SendRecv",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "SendRecv",
    "scatter": "SendRecv",
    "send": "SendRecv",
    "recv": "SendRecv",
    "barrier": "AllReduce",
}

SCALAR_TYPES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble", "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}  # fmt: skip
"""torch dtype → ``c10::toString(ScalarType)``, which is what the argument ``dtype`` of a collective holds."""

INPUT_TYPES = {
    "float64": "double", "float32": "float", "float16": "c10::Half", "bfloat16": "c10::BFloat16",
    "int64": "long int", "int32": "int", "int16": "short int", "int8": "signed char",
    "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip
"""torch dtype → C++ type name, which is what the argument ``Input type`` of a CPU op holds."""

NCCL_TYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int8": "i8", "uint8": "u8", "bool": "u8",
}  # fmt: skip

MAX_LISTED_RANKS = 30
"""torch cuts ``Process Group Ranks`` to this many (``kTruncatLength``)."""


def op_name(signature: OpSignature) -> str:
    """Name of the CPU op: without the overload, as the profiler prints it."""
    if signature.op == "prism::fused":
        return str(signature.attrs.get("name", signature.op))
    namespace, _, rest = signature.op.partition("::")
    return f"{namespace}::{rest.partition('.')[0]}" if rest else signature.op


def kernel_name(signature: OpSignature) -> str:
    """Name of the device work of an op. Real kernel names are not known; the op stands for its kernels."""
    return memory_op_name(signature) or op_name(signature)


def nccl_kernel_name(kinds: set[str], dtype: str, reduce_op: str) -> str:
    """``ncclDevKernel_AllReduce_Sum_bf16``: NCCL's name without algorithm and protocol, which are not chosen here."""
    functions = {NCCL_FUNCTIONS.get(kind, "SendRecv") for kind in kinds}
    function = functions.pop() if len(functions) == 1 else "SendRecv"
    if function in ("AllReduce", "ReduceScatter", "Reduce"):
        operation = "Sum" if reduce_op.upper() in ("", "SUM", "AVG") else reduce_op.capitalize()
        return f"ncclDevKernel_{function}_{operation}_{NCCL_TYPES.get(dtype, dtype or 'u8')}"
    return f"ncclDevKernel_{function}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """``Process Group Ranks`` as torch writes it: a string, long lists cut."""
    if len(ranks) <= MAX_LISTED_RANKS:
        return "[" + ", ".join(map(str, ranks)) + "]"
    return "[" + ", ".join(map(str, ranks[: MAX_LISTED_RANKS - 1])) + f", ..., {ranks[-1]}]"


def comm_args(signatures: list[CommSignature], ranks: tuple[int, ...], name: str, desc: str) -> dict:
    """Arguments of a communication kernel, spelled as Kineto spells them. Several signatures were coalesced."""
    first = signatures[0]
    kinds = {s.kind for s in signatures}
    args: dict = {
        "Collective name": COLLECTIVE_NAMES.get(first.kind, first.kind) if len(kinds) == 1 else "coalesced",
        "In msg nelems": sum(s.in_numel for s in signatures),
        "Out msg nelems": sum(s.out_numel for s in signatures),
        "Group size": len(ranks),
        "dtype": SCALAR_TYPES.get(first.dtype, first.dtype),
        "In split size": str(list(first.send_splits)),
        "Out split size": str(list(first.recv_splits)),
        "Process Group Name": name,
        "Process Group Description": desc,
        "Process Group Ranks": ranks_text(ranks),
    }
    sources = [
        ranks[s.peer] for s in signatures if s.kind in ("recv", "broadcast", "scatter") and s.peer >= 0
    ]
    targets = [ranks[s.peer] for s in signatures if s.kind in ("send", "reduce", "gather") and s.peer >= 0]
    if sources:
        args["Src Rank"] = sources[0]
    if targets:
        args["Dst Rank"] = targets[0]
    if len(signatures) > 1:
        args["Coalesced"] = [describe_comm(s, ranks) for s in signatures]
    return args


def describe_comm(signature: CommSignature, ranks: tuple[int, ...]) -> str:
    """One call in words: ``send to 8, 8388608 bfloat16``."""
    peer = ranks[signature.peer] if 0 <= signature.peer < len(ranks) else -1
    side = {"send": f" to {peer}", "recv": f" from {peer}"}.get(signature.kind, "")
    return f"{signature.kind}{side}, {max(signature.in_numel, signature.out_numel)} {signature.dtype}"


def phase_name(phase: Phase) -> str:
    """``forward mb 3 chunk 1``; p2p phases name their parts: ``send_forward_recv_backward (3, 0)``."""
    name = phase.kind
    if phase.microbatch >= 0:
        name += f" mb {phase.microbatch}"
    if phase.chunk >= 0:
        name += f" chunk {phase.chunk}"
    if phase.parts and phase.microbatch < 0:
        name += " (" + ", ".join(str(ordinal) for _, ordinal in phase.parts) + ")"
    return name
