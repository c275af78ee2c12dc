"""The heads of a program that ``lowtide run --defer-logits`` runs: logits that are not
made, and at the end whether any were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lowtide._base.classes import class_name
from lowtide._sharding.unit import unit_state
from lowtide.losses import defer_logits
from lowtide.losses._heads import NoHead, Tally, find_head, tally_of
from lowtide.losses._sharded import can_stream

_WHO = "lowtide: run: --defer-logits"


class Deferral:
    """See :func:`lowtide.defer_logits`.

    Args:
        name: The head's, in every model that the program shards. ``""``: the head is
            found, as :func:`find_head` does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._heads: list[tuple[str, Tally]] = []

    def shard_head(
        self,
        fully_shard: Callable[..., Any],
        modules: Sequence[nn.Module],
        settings: dict[str, Any],
    ) -> list[nn.Module]:
        """Before ``fully_shard(modules, **settings)``: makes a head that it would take
        into a larger unit one of its own, so that its rows are streamed and it may be
        resharded after the forward. Returns the modules that are left."""
        head = self._head_within(modules)
        if head is None or not _is_alone(modules, head, settings):
            return list(modules)
        fully_shard(head, **settings)
        state = unit_state(head)
        assert state is not None
        state.instead = "run without --defer-logits, which chose this one"
        return [module for module in modules if module is not head]

    def _head_within(self, modules: Sequence[nn.Module]) -> nn.Linear | None:
        """Of one module, if it is a whole model: a block, which has no embedding, may
        have a layer of the head's name. Of a list, as the last norm and the head: the
        linear layer of many outputs, whatever its name is in the model."""
        if len(modules) > 1:
            wide = [m for m in modules if isinstance(m, nn.Linear)]
            return wide[0] if len(wide) == 1 and _widens(wide[0]) else None
        (model,) = modules
        if not any(isinstance(m, nn.Embedding) for m in model.modules()):
            return None
        try:
            _, head = find_head(model, self._name)
        except NoHead:  # its first forward will tell, if it is a whole model
            return None
        return head if head is not model else None

    def defer(self, root: nn.Module, speaks: bool) -> None:
        """Before the first forward of ``root``, a whole model. Raises ValueError where
        it has no head, or several."""
        try:
            name, head = find_head(root, self._name)
        except NoHead as error:
            raise ValueError(
                f"{_WHO}: {error} For example --defer-logits=output; or leave the "
                "option out."
            ) from None
        defer_logits(head)
        where = f"{class_name(root)}.{name}"
        self._heads.append((where, tally_of(head)))
        if speaks:
            state = unit_state(head)
            streams = state is not None and can_stream(state)
            print(
                f"{_WHO}: {where}, {head.in_features} to {head.out_features}, "
                f"{'its rows streamed' if streams else 'gathered whole for its loss'}; "
                "logits are made where something other than a cross entropy asks",
                file=sys.stderr,
            )

    def forget(self) -> None:
        """In a process that was forked."""
        self._heads = []

    def lines(self) -> Iterator[str]:
        for where, tally in self._heads:
            made = tally.made.total()
            yield (
                f"{_WHO}: {where}: {_times(tally.calls, 'call')}, "
                f"{_times(tally.losses, 'loss', 'losses')} without logits, logits made "
                f"{_times(made, 'time')}{_by(tally)}"
            )


def _is_alone(
    modules: Sequence[nn.Module], head: nn.Linear, settings: dict[str, Any]
) -> bool:
    """Its parameters are its own, and not sharded yet."""
    mine = {id(parameter) for parameter in head.parameters()}
    named = [
        id(parameter)
        for module in modules
        for _, parameter in module.named_parameters(remove_duplicate=False)
    ]
    ignored = {id(parameter) for parameter in settings.get("ignored_params") or ()}
    return (
        sum(parameter in mine for parameter in named) == len(mine)
        and not any(isinstance(parameter, DTensor) for parameter in head.parameters())
        and not mine & ignored
    )


def _widens(layer: nn.Linear) -> bool:
    return layer.out_features > layer.in_features


def _times(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _by(tally: Tally) -> str:
    said = [f"{what} ({number})" for what, number in tally.made.most_common()]
    return f": {', '.join(said)}" if said else ""
