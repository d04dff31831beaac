"""These tests need megatron-core, an extra of the package."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]
