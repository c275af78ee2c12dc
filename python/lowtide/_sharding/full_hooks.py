"""``register_post_accumulate_grad_hook`` on a gathered parameter, as transformers'
tensor parallelism does in its forwards: called with each gradient that comes, as
``.grad``, before it is reduced. Autograd has nothing to accumulate it in: a hook of the
tensor calls them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class PostAccumulateHooks(OrderedDict[int, Callable[[nn.Parameter], Any]]):
    """Of one full parameter, in the place of what ``torch.Tensor`` would make.

    Args:
        owner: Has the parameter as its ``full``, and its ``name``. Weakly, or neither
            would be collected.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)
        self._watched = False

    def __setitem__(self, number: int, hook: Callable[[nn.Parameter], Any]) -> None:
        super().__setitem__(number, hook)
        if not self._watched:
            self._watched = True
            owner = self._owner()
            assert owner is not None
            owner.full.register_hook(self._call)

    def _call(self, gradient: Tensor) -> Tensor:
        owner = self._owner()
        assert owner is not None
        full: nn.Parameter = owner.full
        kept, full.grad = full.grad, gradient
        try:
            for hook in list(self.values()):
                hook(full)
            result = full.grad
        finally:
            full.grad = kept
        if result is None:
            raise RuntimeError(
                f"lowtide: {owner.name}: expected the hooks registered on the gathered "
                "parameter with register_post_accumulate_grad_hook to leave its "
                "gradient, got None. Register on the sharded parameter, before the "
                "forward, what takes gradients away."
            )
        return result
