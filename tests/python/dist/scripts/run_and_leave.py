"""run_and_leave.py SCRIPT [ARG...]: run SCRIPT, then exit without teardown.

torch 2.11's gloo threads drop their last reference to a collective's tensors
whenever the scheduler lets them, and need the GIL for it.  If the interpreter
is finalizing by then, the process aborts ("terminate called without an active
exception"), once in some ten to thirty runs, with FSDP2 as with anything else.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
