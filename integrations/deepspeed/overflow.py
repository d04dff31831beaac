"""Overflow checks: DeepSpeed skips an optimizer step whose gradients are not finite.

Gradients of an emulated job are synthesized, or computed from synthesized values: whether they are finite says nothing
about the job. The checks run as they are; their answer is that nothing overflowed, and the loss scale stays.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session


def _finite(session: Session, original: Any, module: ModuleType) -> Any:
    """A check that says no; where values are computed it answers itself."""
    if session.context.spec.device != "virtual":
        return original

    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> bool:
        if original(*args, **kwargs):
            session.context.assume(
                "no gradient overflows: every optimizer step is taken, and a dynamic loss scale stays what it is"
            )
        return False

    return check


HOOKS = tuple(
    Hook(module, attribute, _finite, "optimizer steps that synthesized gradients must not skip")
    for module, attribute in (
        ("deepspeed.runtime.utils", "CheckOverflow.has_overflow"),
        ("deepspeed.runtime.utils", "is_invalid_grad_norm"),
        ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.has_overflow"),
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3.has_overflow"),
    )
)
