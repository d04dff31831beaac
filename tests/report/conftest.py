"""The finished run of tests/emit, simulated."""

import pytest

from prism_plugins.cli_run import load_view
from prism_plugins.report.insight import look_into
from tests.emit.conftest import build, prediction, run  # noqa: F401


@pytest.fixture
def view(run):  # noqa: F811
    return load_view(run)


@pytest.fixture
def insight(view):
    return look_into(view)
