"""DeepSpeed's compiled ops on the virtual device: recorded, not computed.

Builders of ops that have no equivalent here stay DeepSpeed's own; loading one tells the user which option needs it
(the virtual device refuses to compile CUDA extensions).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prism_plugins.integration import SliceContext


def virtual_builder(context: SliceContext, class_name: str) -> type | None:
    """The builder class for an op that is emulated, else None."""
    make = _OPS.get(class_name)
    if make is None:
        return None

    class Builder:
        """A builder whose op is ready."""

        NAME = class_name.removesuffix("Builder")

        def absolute_name(self) -> str:
            return f"prism_plugins.{self.NAME}"

        def is_compatible(self, verbose: bool = False) -> bool:
            return True

        def builder_available(self) -> bool:
            return True

        def load(self, verbose: bool = False) -> Any:
            return make(context)

    Builder.__name__ = Builder.__qualname__ = class_name
    return Builder


def _fused_adam(context: SliceContext) -> Any:
    """``multi_tensor_adam(chunk_size, noop_flag, [grads, params, exp_avgs, exp_avg_sqs], ...)``: one kernel.

    Tensors that have values are computed, as the kernel does: on the ``cpu`` device a model learns.
    """
    from prism_plugins.capture.recorder import get_recorder
    from prism_plugins.device.tensors import is_shape_only

    def multi_tensor_adam(chunk: int, noop: Any, lists: list[list[Any]], *hyper: Any) -> None:
        grads, params, first, second = lists
        get_recorder().kernel("deepspeed::multi_tensor_adam", [*params, *grads, *first, *second])
        for tensors in zip(*lists, strict=True):
            if not any(is_shape_only(tensor) for tensor in tensors):
                _adam(*tensors, *hyper)

    return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)


def _adam(
    grad: Any,
    param: Any,
    first: Any,
    second: Any,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam (``decoupled``: AdamW) on the memory behind the tensors; nothing is recorded."""
    from prism_plugins.device.tensors import host_view, is_synthesized, mark_synthesized

    updated = (param, first, second)
    if any(is_synthesized(tensor) for tensor in (grad, *updated)):
        for tensor in updated:
            mark_synthesized(tensor)
    param, grad, first, second = (host_view(tensor) for tensor in (param, grad, first, second))
    value, slope = param.float(), grad.float()
    if not decoupled:
        slope = slope + weight_decay * value
    first.lerp_(slope.to(first.dtype), 1 - beta1)
    second.mul_(beta2).addcmul_(slope.to(second.dtype), slope.to(second.dtype), value=1 - beta2)
    correction1, correction2 = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    update = (first.float() / correction1) / ((second.float() / correction2).sqrt() + eps)
    if decoupled:
        update = update + weight_decay * value
    param.copy_(value - lr * update)


def _fused_lion(context: SliceContext) -> Any:
    """``multi_tensor_lion(chunk_size, noop_flag, [grads, params, exp_avgs], ...)``: one kernel."""
    from prism_plugins.capture.recorder import get_recorder

    def multi_tensor_lion(chunk: int, noop: Any, lists: list[list[Any]], *hyper: Any) -> None:
        grads, params, first = lists
        get_recorder().kernel("deepspeed::multi_tensor_lion", [*params, *grads, *first])
        _synthesize([*params, *first])

    return SimpleNamespace(multi_tensor_lion=multi_tensor_lion)


def _fused_lamb(context: SliceContext) -> Any:
    """``lamb(param, out_param, exp_avg, exp_avg_sq, grad, ...)``, parameter by parameter: its trust ratio."""
    from prism_plugins.capture.recorder import get_recorder

    def lamb(param: Any, copy: Any, first: Any, second: Any, grad: Any, *hyper: Any) -> Any:
        ratio = param.new_ones(1)
        get_recorder().kernel("deepspeed::multi_tensor_lamb", [param, grad, first, second])
        _synthesize([param, first, second, ratio])
        return ratio

    return SimpleNamespace(lamb=lamb)


def _synthesize(tensors: list[Any]) -> None:
    """The kernel is not computed: from now on the tensors' values are made up."""
    from prism_plugins.device.tensors import mark_synthesized

    for tensor in tensors:
        mark_synthesized(tensor)


def _utils(context: SliceContext) -> Any:
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    return SimpleNamespace(flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors)


def _nothing(*arguments: Any) -> None:
    """The compiled object behind a CPU optimizer holds no tensors."""


def _cpu_optimizer(name: str, num_tensors: int) -> Callable[[SliceContext], Any]:
    """The op of a CPU optimizer: an update takes its tensors (parameter, gradient, states) last; one pass over host
    memory."""

    def make(context: SliceContext) -> Any:
        from prism_plugins.capture.recorder import get_recorder

        def update(*arguments: Any) -> None:
            get_recorder().host_op(f"host::cpu_{name}", arguments[-num_tensors:])

        ops = {f"create_{name}": _nothing, f"destroy_{name}": _nothing, f"{name}_update": update}
        return SimpleNamespace(**ops)

    return make


_OPS = {
    "FusedAdamBuilder": _fused_adam,
    "FusedLambBuilder": _fused_lamb,
    "FusedLionBuilder": _fused_lion,
    "UtilsBuilder": _utils,
    "CPUAdamBuilder": _cpu_optimizer("adam", 4),
    "CPUAdagradBuilder": _cpu_optimizer("adagrad", 3),
    "CPULionBuilder": _cpu_optimizer("lion", 3),
}
