"""Rebuilds a runnable op from its signature: looks the op up in ``torch.ops`` and gives every argument a value.

A signature lists tensors in schema order, without the 0-dim CPU tensors that scalars become, and only those scalars
that a cost may depend on; floats are not among them. So: tensors that are missing are scalars; optional tensors are
present as far as the list reaches; floats get ordinary values; integer operands are indices within range. Backward
ops of attention take what their forward gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from prism_plugins.calibration.values import Operands
from prism_plugins.costs.families import base_name
from prism_plugins.program.model import OpSignature, TensorSpec


class CannotRebuild(Exception):
    """The op cannot be executed from its signature; the message says why, without shapes."""


class Call:
    """An op with ready operands."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Issue it once."""
        return self.function(*self.args, **self.kwargs)


def rebuild(signature: OpSignature, operands: Operands) -> Call:
    """An executable call. Raises :class:`CannotRebuild`."""
    overload = find_op(signature.op)
    name = base_name(signature.op)
    if name in _DATA_DEPENDENT:
        raise CannotRebuild(f"{signature.op}: its cost depends on values")
    if name in _ATTENTION_BACKWARD:
        return _attention_backward(overload, _ATTENTION_BACKWARD[name], signature, operands)
    return _bind(overload, signature, operands)


def find_op(qualified: str) -> Any:
    """The overload behind ``aten::add.Tensor``. Raises :class:`CannotRebuild` where torch has no such op."""
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    if namespace == "prism":
        raise CannotRebuild("prism::fused: kernels of the compiler are not rebuilt")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        raise CannotRebuild(f"{qualified}: this torch has no such op") from None


_DATA_DEPENDENT = {
    "nonzero",
    "masked_select",
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
    "masked_scatter",
}
_ATTENTION_BACKWARD = {
    f"_scaled_dot_product_{kind}_attention_backward": f"_scaled_dot_product_{kind}_attention"
    for kind in ("flash", "efficient", "cudnn")
}
_FLOATS = {
    "eps": 1e-5, "p": 0.1, "dropout_p": 0.0, "lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1,
    "exponent": 2.0, "weight": 0.1, "start": 0.0,
}  # fmt: skip
"""Values of float arguments by schema name; others are 1."""
_OPTIONAL_STATE = {"max_exp_avg_sqs": "amsgrad"}
"""Tensor lists that are empty unless a flag is set."""


def _bind(overload: Any, signature: OpSignature, operands: Operands) -> Call:
    """Give every argument of the schema a value."""
    arguments = overload._schema.arguments
    scalars = dict(signature.scalars)
    shares = _share_out(arguments, signature.inputs, scalars)
    below = _index_bound(signature)
    name = base_name(signature.op)
    num_lists = max((len(v) for v in shares.values() if isinstance(v, list)), default=1)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name in shares:
            share = shares[argument.name]
            if argument.name == "self" and name == "_softmax" and _are_scores(share):
                value = operands.causal_scores(share)
            else:
                value = _materialise(share, operands, written, below)
        else:
            value = _scalar(argument, scalars, operands, num_lists)
            if argument.name == "end" and signature.outputs:
                value = signature.outputs[0].numel  # arange; it starts at 0
            if argument.name == "beta" and _is_scratch(signature):
                value = 0.0
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Call(overload, args, kwargs)


def _are_scores(spec: Any) -> bool:
    """Whether a softmax's input is a square of attention scores, (…, s, s). Masked ones take 29 % longer than random ones
    on an H200 (s 2048), and language models mask them causally."""
    return isinstance(spec, TensorSpec) and len(spec.shape) >= 3 and spec.shape[-1] == spec.shape[-2] > 1


def _is_scratch(s: OpSignature) -> bool:
    """Whether the addend of a GEMM is as large as its output: attention's scratch buffer, multiplied by 0 and not read
    (the same assumption as the cost rule's)."""
    return bool(s.inputs and s.outputs) and s.inputs[0].shape == s.outputs[0].shape


def _materialise(share: Any, operands: Operands, written: bool, below: int) -> Any:
    if isinstance(share, list):
        return [_materialise(one, operands, written, below) for one in share]
    if share is None:
        return None
    if share is _CPU_SCALAR:
        return torch.tensor(1)  # an integer is promoted to whatever the other operand is
    return operands.take(share, written=written, below=below)


_CPU_SCALAR = object()


def _share_out(arguments: Any, inputs: tuple[TensorSpec, ...], scalars: dict[str, Any]) -> dict[str, Any]:
    """Argument name → its spec, a list of them, None, or a CPU scalar. Raises :class:`CannotRebuild`."""
    kinds = [(a.name, _tensor_kind(a.type)) for a in arguments]
    kinds = [(name, kind) for name, kind in kinds if kind]
    lists = [
        name
        for name, kind in kinds
        if kind == "list" and not (name in _OPTIONAL_STATE and not scalars.get(_OPTIONAL_STATE[name]))
    ]
    needed = sum(kind == "tensor" for _, kind in kinds)
    optional = sum(kind == "optional" for _, kind in kinds)
    spare = len(inputs) - needed
    per_list = 0
    if lists:
        if spare < 0 or spare % len(lists):
            # A single tensor beside the lists that is a scalar on the CPU.
            missing = next(
                (m for m in range(1, needed + 1) if (spare + m) >= 0 and not (spare + m) % len(lists)), None
            )
            if missing is None:
                raise CannotRebuild("tensor lists of unequal length")
            spare += missing
            needed -= missing
        elif needed == 1 and len(lists) == 1 and inputs[-1].shape != ():
            spare, needed = spare + 1, 0
        per_list, spare = spare // len(lists), 0
    index_list = next((name for name, kind in kinds if kind == "optional list"), None)
    num_indices = spare if index_list else 0
    if index_list:
        spare = 0
    if spare > optional:
        raise CannotRebuild("more tensors than its schema takes")
    rest = list(inputs)
    shares: dict[str, Any] = {}
    for name, kind in kinds:
        if kind == "tensor":
            shares[name] = rest.pop(0) if needed > 0 and rest else _CPU_SCALAR
            needed -= 1
        elif kind == "optional":
            shares[name] = rest.pop(0) if spare > 0 and rest else None
            spare -= 1
        elif kind == "list":
            n = per_list if name in lists else 0
            shares[name], rest = rest[:n], rest[n:]
        else:
            shares[name], rest = rest[:num_indices], rest[num_indices:]
    return shares


def _tensor_kind(type_: Any) -> str:
    text = str(type_)
    return {
        "Tensor": "tensor",
        "Optional[Tensor]": "optional",
        "List[Tensor]": "list",
        "List[Optional[Tensor]]": "optional list",
    }.get(text, "")


def _scalar(argument: Any, scalars: dict[str, Any], operands: Operands, num_lists: int) -> Any:
    """The value of an argument that is no tensor."""
    name, text = argument.name, str(argument.type)
    if name in scalars:
        value = scalars[name]
        if isinstance(value, (tuple, list)):
            return [bool(v) for v in value] if "bool" in text else list(value)
        return value
    if argument.has_default_value() and argument.default_value is not None:
        return argument.default_value
    if text.startswith("Optional[Device]") or text == "Device":
        return operands.device
    if text.startswith("Optional"):
        # clamp and clip need one bound, addcdiv and others take any number.
        return 1.0 if name in ("min", "max") and "number" in text.lower() else None
    if text in ("float", "number", "Scalar", "Union[complex, float, int]"):
        return _FLOATS.get(name, 1.0)
    if text.startswith("List[") and any(word in text for word in ("float", "number", "complex")):
        return [_FLOATS.get(name, 1.0)] * num_lists
    if text == "bool":
        return False
    raise CannotRebuild(f"argument {name} ({text}) was not recorded")


_ALONG_DIM = {
    "gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy", "index_fill",
    "index_reduce",
}  # fmt: skip


def _index_bound(s: OpSignature) -> int:
    """Exclusive upper bound of integer operands, so that indices are in range."""
    name = base_name(s.op)
    scalars = dict(s.scalars)
    first = s.inputs[0] if s.inputs else TensorSpec("float32", ())
    if name == "embedding_dense_backward":
        return int(scalars.get("num_weights", 1))
    if name == "embedding" and first.shape:
        return first.shape[0]
    if name.startswith("nll_loss"):
        scores = s.inputs[1] if "backward" in name and len(s.inputs) > 1 else first
        return scores.shape[-1] if scores.shape else 1
    if name in _ALONG_DIM:
        dim = scalars.get("dim", 0)
        return first.shape[dim] if first.shape and isinstance(dim, int) else 1
    if name in ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"):
        return min(first.shape, default=1)
    if name in ("bincount", "one_hot"):
        return 64
    return 2


def _attention_backward(overload: Any, forward: str, signature: OpSignature, operands: Operands) -> Call:
    """Run the forward on q, k, v of the backward's signature and pass on what it returns."""
    if len(signature.inputs) < 4:
        raise CannotRebuild(f"{signature.op}: fewer than four tensors")
    grad, q, k, v = (operands.take(t) for t in signature.inputs[:4])
    scalars = dict(signature.scalars)
    causal = bool(scalars.get("is_causal", False))
    op = getattr(torch.ops.aten, forward).default
    if "flash" in forward:
        results = op(q, k, v, 0.0, causal)
    else:
        results = op(q, k, v, None, True, 0.0, causal)
    given = {r.name: value for r, value in zip(op._schema.returns, results, strict=True)}
    given.update(
        grad_out=grad, grad_out_=grad, query=q, key=k, value=v, out=given["output"],
        logsumexp=given.get("logsumexp", given.get("log_sumexp")), attn_bias=None,
        philox_seed=given.get("philox_seed", given.get("rng_state")),
        philox_offset=given.get("philox_offset", given.get("unused")),
        dropout_p=0.0, is_causal=causal, grad_input_mask=[True, True, True, False],
    )  # fmt: skip
    args, kwargs = [], {}
    for argument in overload._schema.arguments:
        value = given.get(argument.name)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Call(overload, args, kwargs)
