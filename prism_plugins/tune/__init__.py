"""``prism tune``: search over parallel layouts with the emulator as the judge. docs/tuning.md tells how."""
