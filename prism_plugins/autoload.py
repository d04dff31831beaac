"""Entry point of the group ``torch.backends``: runs at the end of every ``import torch``.

Without the flag this module is all that is loaded, and it returns at once. With the flag it hands over to
:mod:`prism_plugins.arming`, which replaces the process by the conductor.
"""

import os
import sys

SLICE_MARKER = "PRISM_SLICE"
"""Set in slices (to their rank) and in whatever they start, so that nothing arms twice."""


def arm() -> None:
    """Arm the emulation when this process was asked for it; do nothing otherwise."""
    if not _requested():
        return
    from prism_plugins.arming import take_over

    take_over()


def _requested() -> bool:
    if SLICE_MARKER in os.environ:
        return False
    # What is neither on nor off, and any flag of ours without --prism-emulate, is a mistake that take_over tells.
    if os.environ.get("PRISM_EMULATE", "").lower() not in ("", "0", "false", "no", "off"):
        return True
    return any(word.startswith("--prism-") for word in getattr(sys, "orig_argv", ()))
