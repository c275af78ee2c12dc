"""Steps of one system, each phase inside one call of `ENTRY`.

Under callgrind with `--toggle-collect=ENTRY --dump-after=ENTRY` every phase becomes a
profile of its own, in the order forward, backward, forward, ...
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from host_models import Training, start

# What CPython runs `a @= b` by: an exported function, called for nothing else.
ENTRY = "PyNumber_InPlaceMatrixMultiply"
NUM_LAYERS = 8
WARM_UP = 5
NUM_STEPS = 3


class Profiled:
    """``profiled @= function`` calls the function, inside ``ENTRY``."""

    def __imatmul__(self, function: Callable[[], None]) -> Profiled:
        function()
        return self


def main() -> None:
    start()
    training = Training(sys.argv[1], NUM_LAYERS)
    for _ in range(WARM_UP):
        training.forward()
        training.backward()
        training.finish()
    gc.collect()
    gc.disable()
    profiled = Profiled()
    for _ in range(NUM_STEPS):
        profiled @= training.forward
        profiled @= training.backward
        training.finish()


if __name__ == "__main__":
    main()
