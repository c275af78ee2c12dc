"""A program of this folder as it stands, or as `python -m lowtide run` has it:

unedited.py fsdp2 PROGRAM [ARG ...]
unedited.py lowtide [OPTION ...] PROGRAM [ARG ...]
unedited.py shared [OPTION ...] PROGRAM [ARG ...]   with one communicator
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings

from launch import PROGRAMS

from lowtide.cli import main

if __name__ == "__main__":
    _, system, *words = sys.argv
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    words[at] = str(PROGRAMS / words[at])
    if system == "shared":
        os.environ["LOWTIDE_COMMUNICATORS"] = "shared"
    if system != "fsdp2":
        warnings.filterwarnings("error", "lowtide: deferred logits")
        sys.exit(main(["run", *words]))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
