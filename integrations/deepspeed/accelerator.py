"""DeepSpeed's accelerator, by its own extension point: CUDA as the virtual device offers it.

Everything is inherited from DeepSpeed's ``CUDA_Accelerator``, which talks to ``torch.cuda``, but for what reaches
past torch: op builders (compiled kernels) and NVML.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.integrations.deepspeed.builders import virtual_builder


def use_virtual_accelerator(context: SliceContext) -> None:
    """Have DeepSpeed use the virtual accelerator from its first import on.

    ``deepspeed.utils.timer`` asks for ``get_accelerator().Event`` in a class body, so the accelerator is set right
    after the module that chooses it was imported.
    """
    context.on_import("deepspeed.accelerator.real_accelerator", lambda module: _set(context, module))


def _set(context: SliceContext, module: ModuleType) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    class VirtualCudaAccelerator(CUDA_Accelerator):
        """CUDA on the virtual device."""

        def _init_pynvml(self) -> None:
            """NVML would tell of this machine's GPUs."""

        def available_memory(self, device_index: int | None = None) -> int:
            """Free memory of the target's GPU, bytes."""
            return self.total_memory(device_index) - self.memory_allocated(device_index)

        def is_triton_supported(self) -> bool:
            """Triton kernels cannot run here."""
            return False

        def create_op_builder(self, class_name: str) -> Any:
            """An instance of a builder, None for an unknown name."""
            builder = self.get_op_builder(class_name)
            return None if builder is None else builder()

        def get_op_builder(self, class_name: str) -> Any:
            """The class of a builder, ours where the op has a virtual equivalent."""
            return virtual_builder(context, class_name) or super().get_op_builder(class_name)

    module.set_accelerator(VirtualCudaAccelerator())
