"""leave_at_exit.py SCRIPT [ARG...]: run SCRIPT; the process ends without teardown,
after what else runs at its end (see run_and_leave.py for why)."""

import atexit
import os
import runpy
import sys


def leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    atexit.register(leave)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as error:
        if getattr(error, "code", 1):  # a failure has its own exit status
            atexit.unregister(leave)
        raise
