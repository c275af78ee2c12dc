"""What only the values can tell: classes in range."""

import torch
from torch import Tensor


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raises ValueError on the CPU. On other devices the check is asynchronous, as
    torch's own: the program ends with the rule in the device's message."""
    wrong = targets.lt(0).logical_or_(targets.ge(vocab_size))
    wrong.logical_and_(targets.ne(ignore_index))
    rule = f"class indices in [0, {vocab_size}) or ignore_index ({ignore_index})"
    if targets.device.type != "cpu":
        text = f"lowtide: linear_cross_entropy: targets: expected {rule}."
        torch._assert_async(wrong.any().logical_not(), text)
    elif wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"lowtide: linear_cross_entropy: targets: expected {rule}, got "
            f"{int(targets[at])} at token {at}. Pass ignore_index, or a head with as "
            "many rows as there are classes."
        )
