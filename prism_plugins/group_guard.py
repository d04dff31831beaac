"""Ends process groups when this process is killed outright: what a slice started does not notice that by itself."""

from __future__ import annotations

import contextlib
import subprocess

_SCRIPT = """
while read -r sign group; do
  kept=
  for known in $groups; do [ "$known" = "$group" ] || kept="$kept $known"; done
  groups=$kept
  [ "$sign" = + ] && groups="$groups $group"
done
for group in $groups; do kill -9 "-$group" 2>/dev/null; done
"""
"""Knows the groups that are alive; its input ends when whoever writes to it does."""


class GroupGuard:
    """A shell in a session of its own that outlives this process for a moment, if need be. It starts with the first
    group."""

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """End this group should we be killed."""
        if self._shell is None:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._tell("+", group)

    def forget(self, group: int) -> None:
        """The group ended; its number may be used again."""
        self._tell("-", group)

    def close(self) -> None:
        """Let the shell end; groups still watched are ended."""
        if self._shell is not None:
            with contextlib.suppress(BrokenPipeError):
                self._shell.stdin.close()
            self._shell.wait()
            self._shell = None

    def _tell(self, sign: str, group: int) -> None:
        # Without its shell (someone killed it) the groups just have no guard.
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(f"{sign} {group}\n".encode())
            self._shell.stdin.flush()
