"""Types of values along the axes of a mesh, and collectives that follow from them.

See docs/replication_rules.md.
"""

from lowtide.spmd.annotation import annotate, types_of
from lowtide.spmd.axes import Axis, use_mesh
from lowtide.spmd.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    convert,
    reduce_scatter,
    reinterpret,
)
from lowtide.spmd.interop import export_rules
from lowtide.spmd.regions import region
from lowtide.spmd.replicas import compare_replicas
from lowtide.spmd.rules import (
    COLLECTIVE,
    LINEAR,
    LOCAL,
    MULTILINEAR,
    SAME_AS,
    cpp_paths,
    register_rule,
    transitions,
)
from lowtide.spmd.types import I, P, R, ReplicationError, Type, V

__all__ = [
    "COLLECTIVE",
    "LINEAR",
    "LOCAL",
    "MULTILINEAR",
    "SAME_AS",
    "Axis",
    "I",
    "P",
    "R",
    "ReplicationError",
    "Type",
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "annotate",
    "compare_replicas",
    "convert",
    "cpp_paths",
    "export_rules",
    "reduce_scatter",
    "region",
    "register_rule",
    "reinterpret",
    "transitions",
    "types_of",
    "use_mesh",
]
