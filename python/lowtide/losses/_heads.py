"""Which linear layer makes a model's logits, and how often they were made."""

import dataclasses
import sys
import weakref
from collections import Counter

from torch import nn

from lowtide._base.classes import class_name
from lowtide._sharding import blocks
from lowtide._sharding.fused import has_own_forward


class NoHead(ValueError):
    """A model without one linear layer that is clearly its head."""


def find_head(model: nn.Module, name: str = "") -> tuple[str, nn.Linear]:
    """The head of ``model`` with its name: the module called ``name``, or by default
    what ``get_output_embeddings`` returns (Hugging Face's models have it), or the one
    ``nn.Linear`` outside of repeated blocks that is tied to an ``nn.Embedding`` or has
    an output for each row of the largest. Raises :class:`NoHead`."""
    if name:
        named = dict(model.named_modules())
        found = {name: named[name]} if name in named else {}
        where = f"a module {name!r}"
    else:
        found = _candidates(model)
        where = "one nn.Linear with an output for each row of its embedding"
    if len(found) != 1:
        got = f"{len(found)}: {', '.join(found)}" if found else "none"
        raise NoHead(
            f"expected {where} in {class_name(model)}, got {got}. Name the layer that "
            "makes the logits."
        )
    ((name, head),) = found.items()
    if not isinstance(head, nn.Linear) or has_own_forward(head):
        raise NoHead(
            f"expected {class_name(model)}.{name} to be an nn.Linear with its class's "
            f"forward, got {class_name(head)}. Name the layer that makes the logits."
        )
    return name, head


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    declared = getattr(model, "get_output_embeddings", None)
    if callable(declared) and isinstance(head := declared(), nn.Module):
        names = {module: name for name, module in model.named_modules()}
        return {names[head]: head} if head in names else {}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        return {}
    vocabulary = max(table.num_embeddings for table in tables)
    weights = {id(table.weight) for table in tables}
    repeated = [u.module for u in blocks.decide(model, set()).units if u.is_block]
    inside = {module for block in repeated for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module not in inside
        and (id(module.weight) in weights or module.out_features == vocabulary)
    }


def known_loss(model: nn.Module) -> str:
    """The name of transformers' loss that ``model`` computes of its logits by nothing
    but a cross entropy; "" for what is not known."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    if losses is None or not hasattr(type(model), "loss_function"):
        return ""
    loss = model.loss_function
    config = getattr(model, "config", None)
    if getattr(config, "final_logit_softcapping", None) is not None:
        return ""
    if loss is not losses.ForCausalLMLoss:
        return ""
    return "transformers' ForCausalLMLoss"


@dataclasses.dataclass
class Tally:
    """Of a head whose logits are deferred: its calls outside of graphs, the losses they
    became, who had logits made, how often (in a graph of torch.compile, each run of
    which makes them, once for each trace), and which of them, by file and line, were
    told."""

    calls: int = 0
    losses: int = 0
    made: Counter[str] = dataclasses.field(default_factory=Counter)
    told: set[tuple[str, str, int]] = dataclasses.field(default_factory=set)


_tallies: weakref.WeakKeyDictionary[nn.Module, Tally] = weakref.WeakKeyDictionary()


def tally_of(head: nn.Module) -> Tally:
    return _tallies.setdefault(head, Tally())
