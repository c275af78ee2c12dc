"""What every rank raises when a checkpoint can not be written or believed."""


class CheckpointError(RuntimeError):
    """A save or a load that did not happen. The model, the optimizer and what was
    saved before are as they were; every rank of the group raises the same text."""
