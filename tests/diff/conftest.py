"""The finished run of tests/emit."""

from tests.emit.conftest import build, prediction, run  # noqa: F401
