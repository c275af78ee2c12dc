"""torch_remat's regions inside of ours: their names are those of a policy.

``torch_remat.region(function, name, recompute=...)`` is a plain call outside of
``torch_remat.checkpoint``. Inside of a checkpointed module what it returns then has its
name, as if it was tagged; what becomes of it the policy says, not ``recompute``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide._base import holders

_PACKAGE = "torch_remat._api"

_followed = False


def follow(tag: Callable[[Tensor, str], Tensor]) -> None:
    """From now on, if the package has been imported. What modules hold of it is
    replaced; a call that was made of a region before has no name."""
    global _followed
    if not _followed and (api := sys.modules.get(_PACKAGE)) is not None:
        _followed = True
        holders.replace(api.region, _naming(api, tag))


def _naming(api: Any, tag: Callable[[Tensor, str], Tensor]) -> Callable[..., Any]:
    region = api.region

    @functools.wraps(region)
    def named_region(
        function: Callable[..., Any], name: str, *, recompute: bool
    ) -> Callable[..., Any]:
        theirs = region(function, name, recompute=recompute)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = theirs(*args, **kwargs)
            if torch.compiler.is_compiling():
                return _tagged(result, name, tag)
            if api._state.get() is None:  # no checkpoint of torch_remat's
                _tagged(result, api._qualified_name(name), tag)
            return result

        return call

    return named_region


def _tagged(result: Any, name: str, tag: Callable[[Tensor, str], Tensor]) -> Any:
    """A tensor, or a tuple or list of tensors and None, as regions return them."""
    if isinstance(result, Tensor):
        return tag(result, name)
    if not isinstance(result, tuple | list):
        return result
    leaves = [tag(x, name) if isinstance(x, Tensor) else x for x in result]
    if hasattr(result, "_fields"):
        return type(result)(*leaves)
    return type(result)(leaves)
