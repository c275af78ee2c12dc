"""Where a checkpoint keeps the model and the optimizer: ours, or whoever saved it with
`torch.distributed.checkpoint.save` under names of his own."""

import dataclasses
from collections.abc import Iterable

from lowtide.saving import content
from lowtide.saving.errors import CheckpointError
from lowtide.saving.verification import Opened

_GROUPS = "param_groups."


@dataclasses.dataclass(frozen=True)
class Placement:
    """Prefixes of names, each empty or ending in a dot."""

    model: str
    optimizer: str | None  # None: no optimizer's state

    def of_optimizer(self, name: str) -> str | None:
        """``name`` without the prefix: ``state.*`` or ``param_groups.*``."""
        if self.optimizer is None or not name.startswith(self.optimizer):
            return None
        rest = name[len(self.optimizer) :]
        return rest if rest.startswith(("state.", _GROUPS)) else None


def placement_of(opened: Opened, model: Iterable[str]) -> Placement:
    names = list(opened.metadata.state_dict_metadata)
    if opened.manifest is not None:
        optimizer = f"{content.OPTIMIZER}."
        saved = any(name.startswith(optimizer) for name in names)
        return Placement(f"{content.MODEL}.", optimizer if saved else None)
    return Placement(_prefix_of_model(opened, names, list(model)), _optimizer(names))


def _prefix_of_model(opened: Opened, names: list[str], model: list[str]) -> str:
    """The one prefix with which the most names of the model are there."""
    counts: dict[str, int] = {}
    wanted = set(model)
    for name in names:
        parts = name.split(".")
        for k in range(len(parts)):
            if ".".join(parts[k:]) in wanted:
                prefix = ".".join(parts[:k])
                prefix = f"{prefix}." if prefix else ""
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [p for p, count in counts.items() if count == max(counts.values())]
    if len(best) != 1:
        got = "none" if not best else f"more than one: {sorted(best)}"
        raise CheckpointError(
            f"lowtide: load: {opened.folder}: expected one place with the model's "
            f"{len(model)} tensors, '{model[0] if model else ''}' among them, got "
            f"{got}. Pass the model that was saved."
        )
    return best[0]


def _optimizer(names: list[str]) -> str | None:
    prefixes = {
        name[: name.index(_GROUPS)]
        for name in names
        if name.startswith(_GROUPS) or f".{_GROUPS}" in name
    }
    return prefixes.pop() if len(prefixes) == 1 else None
