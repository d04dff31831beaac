"""Entry point of the group ``torch.backends``."""


def arm() -> None:
    """Arm the emulation when the flag is there."""
