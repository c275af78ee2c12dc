"""lowtide in other people's programs: ``bind`` puts its ``fully_shard`` where torch's
stands; ``accelerate``, ``lightning``, ``torchtitan`` and ``verl`` are such bindings for
one framework each (docs/frameworks.md)."""

from lowtide.integrations.binding import Binding, bind

__all__ = ["Binding", "bind"]
