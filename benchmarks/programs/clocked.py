"""A program of this folder under the phantom's clock: its events have simulated times.

python -m lowtide phantom -- clocked.py PROGRAM [ARG ...]
"""

from __future__ import annotations

import runpy
import sys

from launch import PROGRAMS

import lowtide.phantom

if __name__ == "__main__":
    sys.argv = [str(PROGRAMS / sys.argv[1]), *sys.argv[2:]]
    with lowtide.phantom.timeline():
        runpy.run_path(sys.argv[0], run_name="__main__")
