"""What the memory of an allocation is for."""

from collections.abc import Sequence

from lowtide import memory
from lowtide.planning.modules import ModuleTable
from lowtide.planning.recording import Allocation
from lowtide.planning.stacks import Line

# In the order of reports and pictures, with what each holds.
CATEGORIES = {
    "parameters": "what the optimizer updates: shards, or whole parameters",
    "optimizer_state": "what the optimizer keeps between steps",
    "gradients": "what .grad holds at the optimizer's step",
    "buffers": "the model's buffers",
    "gathered_parameters": "full parameters in use: gathered units, autocast's copies",
    "full_gradients": "full gradients before they are reduced or cast",
    "communication": "inputs and outputs of collectives",
    "activations": "kept by forward for backward",
    "recomputed": "made again in backward by checkpointing",
    "backward_values": "gradients of activations and other values of backward",
    "inputs": "made in forward outside of modules: the batch",
    "temporaries": "freed within the forward or the optimizer that made them",
    "cublas_workspace": "one per stream and thread that multiplies matrices",
    "other": "made before the first forward and never named",
}

# (end of the file's name, function) -> category, for torch's own wrappers.
_FUNCTIONS = {
    ("_fsdp_param.py", "alloc_all_gather_outputs"): "gathered_parameters",
    ("_fsdp_param.py", "init_all_gather_outputs"): "gathered_parameters",
    ("_fsdp_param.py", "init_unsharded_param"): "gathered_parameters",
    ("_fsdp_collectives.py", "foreach_all_gather"): "communication",
    ("_fsdp_collectives.py", "foreach_all_gather_copy_out"): "communication",
    ("_fsdp_collectives.py", "foreach_reduce"): "communication",
    ("_flat_param.py", "_alloc_padded_unsharded_flat_param"): "gathered_parameters",
    ("nn/parallel/distributed.py", "_ddp_init_helper"): "communication",
    ("nn/parallel/distributed.py", "_pre_forward"): "communication",
    ("distributed_c10d.py", ""): "communication",
}
_CASTS = {"aten::_to_copy", "aten::to", "aten::copy_"}


def wrapper_category(lines: Sequence[Line]) -> str | None:
    """The category of an allocation that torch's wrappers made and not the program."""
    for line in lines:
        if not line.is_in_torch:
            break
        function = line.function.rpartition(".")[2]
        for (file, name), category in _FUNCTIONS.items():
            if line.file.endswith(file) and name in ("", function):
                return category
    return None


def is_loss(lines: Sequence[Line]) -> bool:
    """Called by a loss of torch or lowtide, or by a function called ..._loss."""
    return any(
        line.file.endswith(("torch/nn/modules/loss.py", "lowtide/losses.py"))
        or line.function.rpartition(".")[2].endswith(("_loss", "cross_entropy"))
        for line in lines
    )


def lease_category(lowtides: str) -> str:
    """For a category of lowtide's ledger."""
    return memory.CATEGORIES[lowtides].in_plans


def parameter_of_size(
    allocation: Allocation, module: str | None, modules: ModuleTable
) -> str | None:
    """The parameter of ``module`` that has as many elements of two or four bytes."""
    if module is None:
        return None
    for name, numel in modules.parameters_of(module).items():
        if allocation.bytes in (2 * numel, 4 * numel):
            return f"{module}.{name}".lstrip(".")
    return None


def is_cast(allocation: Allocation) -> bool:
    return allocation.operator in _CASTS
