"""What DeepSpeed moves off the GPU: CPU memory is emulated; NVMe and optimizers in processes of their own are not."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session


def _get_zero_config(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def get_zero_config(param_dict: dict[str, Any]) -> Any:
        config = original(param_dict)
        for name in ("offload_param", "offload_optimizer"):
            section = getattr(config, name, None)
            if section is not None and section.device == "nvme":
                raise PrismError(
                    f'zero_optimization.{name}: offload to "device": "nvme" is not emulated; '
                    'set it to "cpu" to emulate the job with host memory'
                )
        if getattr(config, "zenflow", None) is not None:
            raise PrismError(
                "zero_optimization.zenflow: ZenFlow's optimizer process is not emulated; leave it out"
            )
        if getattr(config.offload_optimizer, "super_offload", False):
            raise PrismError(
                "zero_optimization.offload_optimizer.super_offload: SuperOffload's optimizer process is not emulated; "
                "leave it out"
            )
        return config

    return get_zero_config


HOOKS = (
    Hook(
        "deepspeed.runtime.zero.config",
        "get_zero_config",
        _get_zero_config,
        "refuse offload to NVMe and to other processes",
    ),
)
