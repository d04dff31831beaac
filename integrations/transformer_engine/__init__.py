"""Transformer Engine: its own Python layer, unmodified, on a virtual ``transformer_engine_torch``.

Frameworks that use it (Megatron-core) are other integrations; this one only makes it importable and recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.integration import SliceContext
from prism_plugins.program.prediction import Prediction


class TransformerEngineIntegration:
    """Finds Transformer Engine's Python for a slice and puts virtual kernels under it."""

    name = "transformer_engine"

    def install(self, context: SliceContext) -> None:
        """Register an import finder; nothing of Transformer Engine is imported."""
        from prism_plugins.integrations.transformer_engine.loader import install

        if context.spec.device != "cuda":  # On a real GPU the real one runs.
            install(context)

    def rewrite_log(self, lines: Sequence[str], prediction: Prediction) -> list[str]:
        """Transformer Engine prints no log of its own."""
        return list(lines)
