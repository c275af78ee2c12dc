"""An optimizer's step that breaks off at a chosen operator."""

from __future__ import annotations

import signal
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from support.bombs import Boom


def boom() -> None:
    raise Boom("an operator")


def interrupt() -> None:
    """As Ctrl-C does: the handler runs before the next line of Python."""
    signal.raise_signal(signal.SIGINT)


class BreaksAt(TorchDispatchMode):
    """Calls ``how`` where operator number ``at`` that writes in place would be called;
    counts them. What torch.compile made is not looked into: under a mode that does,
    Dynamo runs the code as it stands, and traces what that calls instead, tracebacks
    of DTensor's fake tensors included, which it refuses."""

    def __init__(self, at: int | None, how: Any = boom) -> None:
        super().__init__()
        self.at, self.how = at, how
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._schema.is_mutable:
            if self.count == self.at:
                self.count += 1
                self.how()
            self.count += 1
        return function(*args, **(kwargs or {}))
