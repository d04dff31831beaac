"""DeepSpeed integration: ``deepspeed.initialize`` engines with ZeRO, pipeline, expert and sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prism_plugins.integration import SliceContext
from prism_plugins.program.prediction import Prediction

if TYPE_CHECKING:
    from prism_plugins.integrations.deepspeed.tune import DeepSpeedTuner


class DeepSpeedIntegration:
    """Hooks DeepSpeed inside a slice, and rewrites its log in the conductor (which never imports DeepSpeed)."""

    name = "deepspeed"

    def install(self, context: SliceContext) -> None:
        """Register import hooks; nothing of DeepSpeed is imported."""
        from prism_plugins.collectives.call_site import skip_frames_of
        from prism_plugins.integration.hook_table import install_hooks
        from prism_plugins.integrations.deepspeed.accelerator import use_virtual_accelerator
        from prism_plugins.integrations.deepspeed.hooks import SUPPORTED, hook_table
        from prism_plugins.integrations.deepspeed.log import tap_log
        from prism_plugins.integrations.deepspeed.session import Session

        # DeepSpeed's own wrappers of torch.distributed only pass calls on.
        skip_frames_of("deepspeed.comm", "deepspeed.utils", "deepspeed.runtime.comm")
        context.on_import(
            "deepspeed.runtime.engine",
            lambda module: context.not_trained_yet(
                "deepspeed was imported, but deepspeed.initialize not called"
            ),
        )
        if context.spec.device != "cuda":  # On a real GPU DeepSpeed's own kernels run.
            use_virtual_accelerator(context)
        install_hooks(context, Session(context), hook_table(), framework="DeepSpeed", supported=SUPPORTED)
        tap_log(context)

    def rewrite_log(self, lines: Sequence[str], prediction: Prediction) -> list[str]:
        """DeepSpeed's per-step lines at target scale; see :mod:`~.log`."""
        from prism_plugins.integrations.deepspeed.log import rewrite_lines

        return rewrite_lines(lines, prediction)

    def tuner(self) -> DeepSpeedTuner:
        """What the layout search changes about a launch; see :mod:`~.tune`."""
        from prism_plugins.integrations.deepspeed.tune import DeepSpeedTuner

        return DeepSpeedTuner()
