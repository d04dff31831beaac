"""What DeepSpeed moves off the GPU: CPU memory is emulated, NVMe is not."""

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
        return config

    return get_zero_config


HOOKS = (Hook("deepspeed.runtime.zero.config", "get_zero_config", _get_zero_config, "refuse NVMe offload"),)
