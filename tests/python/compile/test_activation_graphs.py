"""Regions inside one compiled graph: the partitioner saves, computes again and copies
what the policy names; what it can not do is refused by name or runs eagerly."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

import lowtide
from lowtide import ActivationPolicy, checkpoint
from support.blocks import DIM, HIDDEN, ROWS, Mlp, assert_same_bits, rows, stack, step

LAYERS = 3
RESIDUAL, HIDDEN_VALUE = (ROWS, DIM), (ROWS, HIDDEN)
COPIES = {"enable_activation_offloading": True}


class Graphs:
    """Backends whose graphs can be looked at."""

    def __init__(self) -> None:
        self.forwards: list[torch.fx.Graph] = []

    def _forward(self, graph: torch.fx.GraphModule, _: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            self.forwards.append(graph.graph)
        return make_boxed_func(graph)

    def backend(self, name: str) -> Callable[..., Any]:
        if name == "inductor":
            # All of inductor but the code it writes.
            return functools.partial(compile_fx, inner_compile=self._forward)
        return aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=functools.partial(self._forward, is_backward=True),
            partition_fn=min_cut_rematerialization_partition,
        )

    def outputs(self) -> list[torch.fx.Node]:
        return [
            node
            for graph in self.forwards
            for node in graph.find_nodes(op="output")[0].args[0]
            if isinstance(node, torch.fx.Node)
        ]

    def saved(self, shape: tuple[int, ...], prefix: str = "") -> int:
        """Values of this shape that leave the forward graphs."""
        return sum(
            node.name.startswith(prefix) and tuple(node.meta["val"].shape) == shape
            for node in self.outputs()
        )


class Model(nn.Module):
    """Blocks and what comes after them, so that each residual is inside."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def model(policy: dict[str, Any] | None, **kwargs: Any) -> Model:
    def wrap(block: nn.Module) -> nn.Module:
        return checkpoint(block, ActivationPolicy(**policy)) if policy else block

    if policy == {}:
        return Model(stack(LAYERS, wrap=checkpoint, **kwargs))
    return Model(stack(LAYERS, wrap=wrap, **kwargs))


def in_graph(of: nn.Module, name: str) -> int:
    return lowtide.memory_report(of).activations.names[name].in_graph


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("policy", "hidden"),
    [
        ({}, 0),
        ({"recompute": ["hidden"]}, 0),
        ({"save": ["residual"]}, 0),
        ({"save": ["input"]}, 0),
        ({"save": ["hidden"]}, LAYERS),
        ({"save": ["residual", "hidden"]}, LAYERS),
        ({"save": ["hidden"], "min_bytes": 4 * ROWS * HIDDEN}, LAYERS),
    ],
    ids=str,
)
def test_the_graph_saves_what_the_policy_names(
    policy: dict, hidden: int, backend: str
) -> None:
    graphs = Graphs()
    ours = model(policy)
    ours.compile(backend=graphs.backend(backend), fullgraph=True)
    step(ours)
    assert len(graphs.forwards) == 1
    assert graphs.saved(HIDDEN_VALUE) == hidden
    # Each block's argument, and no other value of that shape.
    assert graphs.saved(RESIDUAL) == LAYERS
    for name in [n for key in ("save", "recompute") for n in policy.get(key, [])]:
        assert in_graph(ours, name) == LAYERS


def test_names_add_no_operator():
    operators = []
    for policy in (None, {"save": ["residual", "hidden"]}):
        graphs = Graphs()
        ours = model(policy)
        ours.compile(backend=graphs.backend("aot_eager"), fullgraph=True)
        step(ours)
        targets = [node.target for node in graphs.forwards[0].nodes]
        operators.append([t for t in targets if isinstance(t, torch._ops.OpOverload)])
    plain, named = operators
    assert named == plain


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("policy", [{}, {"save": ["hidden"]}], ids=str)
def test_same_bits_as_eager_code_in_one_graph(policy: dict, dropout: float) -> None:
    ours, plain = model(policy, dropout=dropout), model(None, dropout=dropout)
    ours.compile(backend="aot_eager", fullgraph=True)
    for seed in range(3):
        with torch._dynamo.config.patch(error_on_recompile=seed >= 1):
            assert_same_bits(step(ours, rows(seed)), step(plain, rows(seed)))
    assert counters["graph_break"] == {}


@pytest.mark.parametrize(
    ("name", "shape"), [("residual", RESIDUAL), ("hidden", HIDDEN_VALUE)]
)
def test_torchs_copies_take_what_the_policy_offloads(
    name: str, shape: tuple[int, int]
) -> None:
    graphs = Graphs()
    ours = model({"offload": [name]})
    ours.compile(backend=graphs.backend("aot_eager"), fullgraph=True)
    with functorch_config.patch(COPIES):
        assert_same_bits(step(ours), step(model(None)))
    assert graphs.saved(shape, prefix="cpu_offload_") == LAYERS
    assert graphs.saved(shape) == LAYERS
    assert in_graph(ours, name) == LAYERS


def test_without_torchs_copies_a_region_that_offloads_runs_outside_of_the_graph():
    graphs = Graphs()
    ours = model({"offload": ["residual"], "save": ["hidden"]})
    ours.compile(backend=graphs.backend("aot_eager"))
    assert_same_bits(step(ours), step(model(None)))
    names = lowtide.memory_report(ours).activations.names
    assert names["residual"].moved == names["hidden"].kept == LAYERS
    assert names["residual"].in_graph == 0


def test_a_region_that_can_not_be_traced_runs_outside_of_the_graph():
    class Printing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(1)
    block = Printing()
    plain = Model(nn.ModuleList([block]))
    expected = step(plain)
    ours = Model(nn.ModuleList([checkpoint(block, ActivationPolicy(save=["hidden"]))]))
    ours.compile(backend="aot_eager")
    assert_same_bits(step(ours), expected)
    assert lowtide.memory_report(ours).activations.names["hidden"].kept == 1


def test_without_grad_mode_nothing_is_named():
    ours = model({"save": ["hidden"]})
    ours.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(ours(rows()), model(None)(rows()))
    assert in_graph(ours, "hidden") == 0


def test_the_name_of_a_view_is_that_of_the_operator_behind_it():
    class Viewed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = lowtide.tag(self.up(self.norm(x)).view(-1, 2, HIDDEN).mT, "hidden")
            return x + self.down(F.gelu(h.mT.reshape(-1, HIDDEN)))

    graphs = Graphs()
    blocks = [checkpoint(Viewed(), ActivationPolicy(save=["hidden"]))]
    ours = Model(nn.ModuleList(blocks))
    ours.compile(backend=graphs.backend("aot_eager"), fullgraph=True)
    step(ours)
    assert graphs.saved(HIDDEN_VALUE) == 1
    assert graphs.saved((ROWS // 2, HIDDEN, 2)) == 0


def test_nested_regions_answer_for_the_names_they_list():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = checkpoint(Mlp(), ActivationPolicy(recompute=["residual"]))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.sin())

    graphs = Graphs()
    torch.manual_seed(1)
    outer = checkpoint(Outer(), ActivationPolicy(save=["hidden"]))
    ours = Model(nn.ModuleList([outer]))
    ours.compile(backend=graphs.backend("aot_eager"), fullgraph=True)
    found = step(ours)
    assert graphs.saved(HIDDEN_VALUE) == 1
    assert in_graph(ours, "hidden") == in_graph(ours, "residual") == 1
    torch.manual_seed(1)
    plain = Outer()
    plain.inner.__class__ = Mlp
    assert_same_bits(found, step(Model(nn.ModuleList([plain]))))


def test_blocks_compiled_after_checkpoint_share_a_graph_that_saves_the_name():
    graphs = Graphs()
    backend = graphs.backend("aot_eager")
    ours = stack(LAYERS)
    for block in ours:
        checkpoint(block, ActivationPolicy(save=["hidden"]))
        block.compile(backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            assert_same_bits(step(ours, rows(seed)), step(stack(LAYERS), rows(seed)))
    assert len(graphs.forwards) == 1
    assert graphs.saved(HIDDEN_VALUE) == 1
    assert in_graph(ours, "hidden") == 1


def test_the_report_says_what_is_in_a_graph():
    ours = model({"save": ["hidden"]})
    ours.compile(backend="aot_eager", fullgraph=True)
    step(ours)
    text = str(lowtide.memory_report(ours))
    assert "  in the latest compiled graph: 3 values" in text


# -- what raises ----------------------------------------------------------------------


def raised(
    policy: dict[str, Any], *, of: nn.Module | None = None, **compile: Any
) -> str:
    ours = of or model(policy)
    ours.compile(**{"backend": "aot_eager", **compile})
    with pytest.raises(Exception, match="lowtide: ") as error:
        step(ours)
    text = str(error.value)
    # The traceback holds torch's checkpoint in the middle of its region, and so, in
    # torch 2.12, the hooks that it has for the tensors that are saved.
    del error
    gc.collect()
    return text


FULL_GRAPH = [
    (
        {"offload": ["residual"]},
        {},
        "lowtide: checkpoint(Mlp): expected a policy without offload inside one "
        "compiled graph, got offload=['residual']. Compile without fullgraph: the "
        "region then runs eagerly, outside of the graph; or set "
        "torch._functorch.config.enable_activation_offloading for torch's copies.",
    ),
    (
        {"offload": ["residual"], "keep_last": 1},
        COPIES,
        "lowtide: checkpoint(Mlp): expected keep_last=0 where torch's compiler copies, "
        "got 1. Compile without fullgraph: the region then runs eagerly, outside of "
        "the graph.",
    ),
    (
        {"save": ["hiden"]},
        {},
        "lowtide: checkpoint(Mlp): expected the policy's names on values of at least "
        "min_bytes=0 in one compiled graph, got none called ['hiden']. Compile without "
        "fullgraph: the region then runs eagerly, and its first backward says why.",
    ),
]


@pytest.mark.parametrize(
    ("policy", "settings", "text"), FULL_GRAPH, ids=lambda v: str(v)[:40]
)
def test_what_one_graph_can_not_do_is_refused_with_fullgraph(
    policy: dict, settings: dict, text: str
) -> None:
    with functorch_config.patch(settings) if settings else contextlib.nullcontext():
        assert text in raised(policy, fullgraph=True)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"save": ["hiden"]}, "Did you mean 'hidden'"),
        ({"save": ["hidden"], "min_bytes": 1 << 20}, "smaller than min_bytes=1048576"),
    ],
    ids=str,
)
def test_without_fullgraph_the_first_backward_says_why(policy: dict, text: str) -> None:
    assert text in raised(policy)


def test_a_backend_that_computes_nothing_again_is_refused():
    assert (
        "lowtide: ActivationPolicy.save: expected 'hidden' in a graph for AOTAutograd, "
        "got a backend that runs the operators as they are and computes nothing again. "
        "Use backend='aot_eager' or 'inductor'."
    ) in raised({"save": ["hidden"]}, backend="eager")


class Attention(nn.Module):
    """Its operator returns more than the named value."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.view(1, 1, ROWS, DIM)
        out = F.scaled_dot_product_attention(q, q, q)
        return lowtide.tag(out, "attention").sin().view(ROWS, DIM)


def test_torchs_copies_of_one_of_several_results_are_refused_by_name():
    ours = Model(
        nn.ModuleList(
            [checkpoint(Attention(), ActivationPolicy(offload=["attention"]))]
        )
    )
    with functorch_config.patch(COPIES):
        text = raised({}, of=ours, fullgraph=True)
    assert (
        "lowtide: ActivationPolicy.offload: expected 'attention' to be the contiguous "
        "and only result of its operator inside one compiled graph, got "
    ) in text
    assert (
        "List it in save, or compile without torch's copies: "
        "torch._functorch.config.enable_activation_offloading = False."
    ) in text
