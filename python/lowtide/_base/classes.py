"""What the program calls the classes of its modules, which lowtide may have changed."""

from torch import nn


def original_class(module: nn.Module) -> type:
    """The program's, also of a module that ``fully_shard`` made an ``FSDPModule``."""
    kind = type(module)
    original: type = getattr(kind, "_original_class", kind)
    return original


def class_name(module: nn.Module) -> str:
    return original_class(module).__name__
