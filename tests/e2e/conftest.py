"""What the tests of real launches share."""

import os
import shutil

import pytest

from tests.e2e.launches import FILES, Place

# Whether this user ran `prism setup-te` must not matter here; tests/transformer_engine chooses for itself.
os.environ.setdefault("PRISM_TE", "none")


@pytest.fixture
def place(tmp_path):
    """A working directory with the script in it, and a slice cache of its own."""
    shutil.copy(FILES / "train.py", tmp_path / "train.py")
    return Place(tmp_path)
