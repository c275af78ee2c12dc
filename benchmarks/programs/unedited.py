"""A program of this folder as it stands, or as `python -m lowtide run` has it:

unedited.py fsdp2 PROGRAM [ARG ...]
unedited.py lowtide [OPTION ...] PROGRAM [ARG ...]
unedited.py shared [OPTION ...] PROGRAM [ARG ...]   with one communicator

With --expandable ahead of these: on expandable segments.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings

import torch
from launch import PROGRAMS

from lowtide.cli import main

if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "--expandable":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        del words[0]
    system, *words = words
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    words[at] = str(PROGRAMS / words[at])
    if system == "shared":
        os.environ["LOWTIDE_COMMUNICATORS"] = "shared"
    if system != "fsdp2":
        warnings.filterwarnings("error", "lowtide: deferred logits")
        sys.exit(main(["run", *words]))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
