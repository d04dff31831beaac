"""The errors a user can meet, each carrying one line that says what, where and what to do."""

from __future__ import annotations


class PrismError(Exception):
    """A mistake or a limit the user can act on. Shown as one line, without traceback; exit status 2."""


class FileFormatError(PrismError):
    """A file that is truncated, foreign, of a newer schema, or otherwise not what it should be."""


class CannotDeriveError(Exception):
    """Some ranks' programs cannot be derived from the slices at hand; the conductor then slices ``ranks``,
    and slices ``again`` ranks whose slices were misinformed."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), again: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.again = again


class SliceFailed(Exception):
    """A slice did not come to its end; carries what the user sees. Exit status 1."""


class Interrupted(BaseException):
    """A signal asked the conductor to stop. Exit status 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
