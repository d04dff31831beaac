"""Where caches may lie, and folders of others that are not trusted."""

import os
from pathlib import Path

import pytest

from prism_plugins.user_cache import cache_folders


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The folder among the temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    return tmp_path / f"prism_plugins-{os.getuid()}"


def test_own_first_then_one_among_the_temporary_files(shared):
    assert cache_folders() == [Path("/home/me/cache/prism_plugins"), shared]
    shared.mkdir(mode=0o700)
    assert shared in cache_folders()


def test_a_folder_that_others_can_write_is_not_trusted(shared, tmp_path):
    shared.mkdir()
    shared.chmod(0o777)
    assert shared not in cache_folders()
    shared.rmdir()
    (tmp_path / "elsewhere").mkdir()
    shared.symlink_to(tmp_path / "elsewhere")
    assert shared not in cache_folders()


def test_a_user_without_home_directory(shared, monkeypatch):
    def nobody(_):
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert cache_folders() == [shared]
