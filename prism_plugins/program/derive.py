"""The program of one pipeline stage from the program of another that holds the same layers."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import Phase, Program


def derive_stage(program: Program, *, captured: Sequence[Phase], target: Sequence[Phase]) -> Program:
    """Reorder a captured stage's program to another stage's schedule; groups stay those of the captured rank.

    Raises :class:`CannotDeriveError`.
    """
    raise CannotDeriveError("stages cannot be derived yet")
