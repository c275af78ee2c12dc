"""accelerate offers its FSDP plugin on accelerators only. Here it takes CPUs for one;
what runs then is its own code.

    accelerate_on_cpus.py SCRIPT [ARG...]     in the environment that torchrun makes
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any


def accept_cpus() -> None:
    """For the rest of this process."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    if hasattr(AcceleratorState.__init__, "__wrapped__"):
        return
    begin = AcceleratorState.__init__

    @functools.wraps(begin)
    def begin_on_cpus(self: Any, *args: Any, **settings: Any) -> None:
        begin(self, *args, **settings)
        plugin = settings.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = begin_on_cpus


def as_torchrun(rank: int, size: int) -> None:
    """What accelerate reads of the environment."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="localhost")
    os.environ.update(MASTER_PORT="0")


def forget() -> None:
    """Its state in this process: the next Accelerator has settings of its own."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


if __name__ == "__main__":
    accept_cpus()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
