"""AutoTP (``tensor_parallel`` of ds_config): the batch of a virtual tensor-parallel peer.

Before the first forward the engine broadcasts the batch of the first rank of a tensor-parallel group and has the
others compare it with their own. A virtual first rank has loaded nothing, so the others cannot compare: they take
theirs to be equal, as DeepSpeed requires, and say so.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session

SAME_BATCH = (
    "the ranks of a tensor-parallel group load the same batch (DeepSpeed compares them before the first forward, "
    "virtual peers cannot)"
)


def _compare(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def compare_tensors_in_structures(own: Any, other: Any) -> bool:
        if other is None and not session.context.spec.real_ranks:
            session.context.assume(SAME_BATCH)
            return True
        return original(own, other)

    return compare_tensors_in_structures


HOOKS = (
    Hook(
        "deepspeed.runtime.engine",
        "compare_tensors_in_structures",
        _compare,
        "the batch of a virtual tensor-parallel peer",
    ),
)
