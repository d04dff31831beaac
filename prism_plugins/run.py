"""``python -m prism_plugins.run [SCRIPT | -m MODULE] …``: the conductor's process.

This is what the flag turns a launch into; starting it by hand is the same, and the way where torch does not load
entry points (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from types import FrameType

from prism_plugins.arming import ARMED
from prism_plugins.errors import Interrupted, PrismError, SliceFailed
from prism_plugins.options import parse_command
from prism_plugins.streams import give_up, prepare_streams


def main() -> int:
    """Run the emulation that the command line asks for; returns the exit status."""
    prepare_streams()
    try:
        job = parse_command(sys.argv[1:])
        os.environ.pop(ARMED, None)
        if job is None:
            from prism_plugins.options_help import print_help

            print_help()
            sys.stdout.flush()
            return 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        if job.options.tune_s:
            from prism_plugins.cli_tune import tune_launch

            return tune_launch(job)
        from prism_plugins.conductor import conduct

        return conduct(job)
    except PrismError as error:
        return _fail(f"prism: error: {error}", 2)
    except SliceFailed as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        # The reader of our output left (`| head`).
        give_up(sys.stdout)
        return 128 + signal.SIGPIPE
    except Interrupted as stop:
        name = signal.Signals(stop.number).name
        kept = (
            "slices on a GPU are measured anew"
            if job.options.device == "cuda"
            else "the same command again reuses the slices that had finished"
        )
        print(f"prism: stopped by {name}; {kept}", file=sys.stderr, flush=True)
        return 128 + stop.number


def _fail(text: str, status: int) -> int:
    print(text, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun shows this in its own summary instead of "to enable traceback see …".
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    # While the children are being ended: a second Ctrl-C ends this process at once; SIGTERM is what torchrun sends
    # after a Ctrl-C that it got as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main())
