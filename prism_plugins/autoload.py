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
    if os.environ.get("PRISM_EMULATE", "").lower() in ("1", "true", "yes", "on"):
        return True
    arguments = getattr(sys, "orig_argv", ())
    return "--prism-emulate" in arguments or "--prism-help" in arguments
