"""GPUs that compute nothing: torch's own CUDA build over a driver of lowtide's, without
a GPU.

`python -m lowtide phantom -- PROGRAM` runs a program on them; :class:`timeline` keeps
their time inside of one.
"""

from lowtide.phantom.clock import timeline

__all__ = ["timeline"]
