"""NVIDIA Apex, for scripts that use its fused kernels where it is installed: a virtual one with ``--prism-apex``."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.integration import SliceContext
from prism_plugins.program.prediction import Prediction


class ApexIntegration:
    """Makes ``import apex`` and its compiled modules work in a slice, where the user says that the cluster has them."""

    name = "apex"

    def install(self, context: SliceContext) -> None:
        """Register an import finder; nothing of Apex is imported."""
        if context.spec.apex and context.spec.device == "virtual":
            from prism_plugins.integrations.apex.loader import install

            install(context)

    def rewrite_log(self, lines: Sequence[str], prediction: Prediction) -> list[str]:
        """Apex prints no log of its own."""
        return list(lines)
