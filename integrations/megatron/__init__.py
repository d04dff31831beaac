"""Megatron-core integration: scripts of ``megatron.training`` and plain megatron-core scripts alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.program.prediction import Prediction


class MegatronIntegration:
    """Hooks Megatron inside a slice, and rewrites its log in the conductor (which never imports Megatron)."""

    name = "megatron"

    def install(self, context: SliceContext) -> None:
        """Register import hooks; nothing of Megatron is imported."""
        from prism_plugins.integration.hook_table import install_hooks
        from prism_plugins.integrations.megatron.hooks import SUPPORTED, hook_table
        from prism_plugins.integrations.megatron.log import tap_log
        from prism_plugins.integrations.megatron.session import Session
        from prism_plugins.integrations.megatron.triton_stub import provide_triton

        provide_triton(context)
        install_hooks(context, Session(context), hook_table(), framework="Megatron", supported=SUPPORTED)
        tap_log(context)

    def rewrite_log(self, lines: Sequence[str], prediction: Prediction) -> list[str]:
        """Megatron's per-iteration lines at target scale; see :mod:`~.log`."""
        from prism_plugins.integrations.megatron.log import rewrite_lines

        return rewrite_lines(lines, prediction)

    def tuner(self) -> Any:
        """The layout search's view; see :mod:`~.tune`."""
        from prism_plugins.integrations.megatron.tune import MegatronTuner

        return MegatronTuner()
