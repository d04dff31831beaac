"""Where this user's caches may lie."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def cache_folders() -> list[Path]:
    """Best first: under XDG_CACHE_HOME or the home directory, then one of ours among the temporary files. Empty for a
    user who has neither. The folders need not exist, or be writable."""
    folders = []
    # Without HOME and an entry in the user database "~" stays as it is.
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        folders.append(Path(base) / "prism_plugins")
    try:
        shared = Path(tempfile.gettempdir()) / f"prism_plugins-{os.getuid()}"
    except FileNotFoundError:
        return folders
    return [*folders, shared] if _is_private(shared) else folders


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put anything there: a library found in it would run as us."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
