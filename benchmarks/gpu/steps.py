"""The steps of gpu_check in their order."""

from __future__ import annotations

from functools import partial

import measure_cases as cases
import measure_llama as llama
import measure_parts as parts
from building import Build, CppTests
from measure_ledger import ledger, ledger_rows
from measuring import Measurement
from sanitizer import sanitizers
from scale import Scale
from step import Step


def steps(scale: Scale) -> list[Step]:
    """Seconds are estimates for an H100 and 16 cores; no run has shown them."""
    return [Build(), CppTests(), *measurements(scale), *sanitizers()]


def measurements(scale: Scale) -> list[Measurement]:
    found = [
        Measurement(
            f"memory-{checkpoint}",
            f"peaks of the slice at world 8, checkpoint {checkpoint}",
            22,
            scale,
            partial(llama.llama_memory, checkpoint),
            partial(llama.llama_memory_rows, checkpoint),
        )
        for checkpoint in llama.CHECKPOINTS
    ]
    rest = (
        (
            *("bits", "losses and parameters beside FSDP2's", 20),
            *(llama.bits, llama.bits_rows),
        ),
        (
            *("graphs", "losses and parameters of CUDA graphs", 15),
            *(llama.graphs, llama.variants_rows),
        ),
        *(
            (
                *(f"speed-{name}", f"step time of the slice, NCCL, loss {loss}", 23),
                partial(llama.llama_speed, loss),
                partial(llama.llama_speed_rows, loss),
            )
            for name, loss in llama.losses(scale).items()
        ),
        (
            *("links", "bandwidth to and from the host", 8),
            *(parts.links, parts.links_rows),
        ),
        (
            *("kernels", "bandwidth of the operators", 8),
            *(parts.kernels, parts.kernels_rows),
        ),
        (
            *("case1-memory", "peaks with flat gradients", 17),
            *(cases.flat_peaks, cases.flat_peaks_rows),
        ),
        (
            *("case1-speed", "rate with flat gradients", 13),
            *(cases.flat_speed, cases.flat_speed_rows),
        ),
        (
            *("case2-memory", "peaks with offload of the residual", 45),
            *(cases.residual_peaks, cases.residual_peaks_rows),
        ),
        (
            *("case2-speed", "step time with offload of the residual", 65),
            *(cases.residual_speed, cases.residual_speed_rows),
        ),
        (
            *("host", "host time per unit", 15),
            *(parts.host_units, parts.host_units_rows),
        ),
        ("ledger", "ledger, and the same step dry", 20, ledger, ledger_rows),
    )
    return found + [
        Measurement(name, what, seconds, scale, measure, rows)
        for name, what, seconds, measure, rows in rest
    ]
