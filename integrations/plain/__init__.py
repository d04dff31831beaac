"""Scripts without a framework: a loop of ``torch.distributed`` calls around a torch optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.integration import SliceContext
from prism_plugins.program.prediction import Prediction


class PlainIntegration:
    """Takes a script over when an optimizer of torch steps and no framework has told what the job is."""

    name = "torch.distributed"

    def install(self, context: SliceContext) -> None:
        """Register import hooks; nothing is imported."""
        from prism_plugins.integrations.plain.session import Session

        session = Session(context)
        context.on_import("torch.optim.optimizer", session.watch_optimizers)
        context.on_import("torch.utils.data.dataloader", session.watch_loaders)

    def rewrite_log(self, lines: Sequence[str], prediction: Prediction) -> list[str]:
        """A plain script has no log lines that prism knows."""
        return []
