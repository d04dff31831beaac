"""Apex's multi-tensor applier and optimizers, for where its Python is not installed.

Sources: ``apex/multi_tensor_apply/multi_tensor_apply.py``, ``apex/optimizers/fused_adam.py``, ``fused_sgd.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prism_plugins.errors import PrismError

_CHUNK = 2048 * 32


class MultiTensorApply:
    """Calls a kernel on lists of tensors."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop: Tensor, lists: Sequence[Sequence[Tensor]], *arguments: Any
    ) -> Any:
        """What the kernel returns."""
        return op(self.chunk_size, noop, lists, *arguments)


multi_tensor_applier = MultiTensorApply(_CHUNK)


def fill_applier(module: ModuleType) -> None:
    """``apex.multi_tensor_apply``."""
    module.MultiTensorApply, module.multi_tensor_applier = MultiTensorApply, multi_tensor_applier


class FusedAdam(torch.optim.Optimizer):
    """Adam in one kernel over all parameters of a dtype; moments are fp32."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if capturable or master_weights:
            raise PrismError("apex.optimizers.FusedAdam(capturable=True) is not emulated")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero them where the optimizer was made so."""
        super().zero_grad(set_to_none=self.set_grad_none and set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One kernel for each parameter group and dtype."""
        import amp_C

        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p.data).float()
                    state["exp_avg_sq"] = torch.zeros_like(p.data).float()
                lists = by_dtype.setdefault(p.dtype, [[], [], [], []])
                operands = (p.grad.data, p.data, state["exp_avg"], state["exp_avg_sq"])
                for tensors, tensor in zip(lists, operands, strict=True):
                    tensors.append(tensor)
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                if dtype in by_dtype:
                    multi_tensor_applier(
                        amp_C.multi_tensor_adam, self._dummy_overflow_buf, by_dtype[dtype], group["lr"], *group["betas"],
                        group["eps"], group["step"], self.adam_w_mode, int(group["bias_correction"]), group["weight_decay"],
                    )  # fmt: skip
        return loss


class FusedSGD(torch.optim.Optimizer):
    """Not emulated; there so that it can be imported."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise PrismError("apex.optimizers.FusedSGD is not emulated: train with another optimizer")


def fill_optimizers(module: ModuleType) -> None:
    """``apex.optimizers``."""
    module.FusedAdam, module.FusedSGD = FusedAdam, FusedSGD
