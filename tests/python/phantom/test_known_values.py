"""What follows from values of the host is right on the device, whatever computes it;
what routers choose is balanced; and torch.compile does not look into what tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.dry_process import call_dry

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")

EXPERTS, TOKENS, TOP_K = 8, 64, 2


def notes() -> dict[str, int]:
    import sys

    inside: Any = sys.modules["_lowtide_dry.values"]
    found = {}
    for (what, _), times in inside.notes.items():
        found[what] = found.get(what, 0) + times
    inside.notes.clear()
    return found


def derived() -> dict[str, Any]:
    """The same of CUDA and of the host, by name."""
    found = {}
    for device in ("cuda", "cpu"):
        places = torch.arange(300, device=device).unsqueeze(0)
        steps = torch.diff(places, prepend=places[:, :1] - 1)
        causal = torch.triu(torch.ones(400, 400), diagonal=1).to(device)
        again = torch.triu(torch.ones(400, 400, device=device), diagonal=1)
        some = torch.tensor([3, 1, 3, 7]).to(device)
        distinct = torch.unique(some, return_inverse=True, return_counts=True)
        infinite = torch.tensor([1.0, float("inf")]).to(device)
        found[device] = {
            "one sequence": bool((steps == 1).all()),
            "causal": bool((causal == again).all()),
            "above the diagonal": list(causal.nonzero().shape),
            "where": some.eq(3).nonzero().tolist(),
            "masked": some[some > 1].tolist(),
            "distinct": [part.tolist() for part in distinct],
            "infinite": infinite.isinf().tolist(),
            "grid": torch.linspace(0, 1, 5, device=device).tolist(),
            "eye": torch.eye(2, device=device).tolist(),
            "below": torch.tril_indices(3, 3, device=device).tolist(),
            "counted": F.one_hot(some, 8).sum(0).tolist(),
            "cast": (some > 1).any().float().item(),
        }
    return found | {"notes": notes()}


def test_what_follows_from_the_hosts_values():
    found = call_dry(derived)
    assert found["cuda"] == found["cpu"]
    assert found["notes"] == {}


def unseen() -> dict[str, Any]:
    table = torch.nn.Embedding(4, 4, device="cuda")
    table(torch.tensor([1, 2]).cuda()).square().sum().backward()
    assert table.weight.grad is not None
    gradient = table.weight.grad.sum().item()  # its kernel writes over zeros
    read = notes()
    repr(torch.randn(8, 8, device="cuda"))
    printed = notes()
    torch.randint(9, (4,), device="cuda").tolist()
    return {"gradient": gradient, "notes": [read, printed, notes()]}


def test_what_kernels_write_is_not_what_lay_there():
    found = call_dry(unseen)
    read, printed, copied = found["notes"]
    assert found["gradient"] == 1
    assert read == {"a number read back is 1": 1}
    assert list(printed) == ["a number read back is 1"]  # no truths, no sizes
    assert copied == {"whole numbers and truth values that are copied back are 0": 1}


def routed() -> dict[str, Any]:
    scores = torch.randn(TOKENS, EXPERTS, device="cuda")
    weights, chosen = scores.softmax(-1).topk(TOP_K)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
    by_hand = [len(torch.where((chosen == e).any(-1))[0]) for e in range(EXPERTS)]
    return {
        "hit": hit.flatten().tolist(),
        "tokens": [len(torch.where(mask[e])[0]) for e in hit.flatten()],
        "by hand": by_hand,
        "sorted": torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).tolist(),
        "experts": len(chosen.unique()),
        "others": len(scores[~(chosen == 3).any(-1)]),
        "notes": notes(),
        "all": len((scores > 0).nonzero()),
    }


def test_routers_are_balanced():
    found = call_dry(routed)
    share = TOKENS * TOP_K // EXPERTS
    assert found["hit"] == list(range(EXPERTS))
    for how in ("tokens", "by hand", "sorted"):
        assert found[how] == [share] * EXPERTS, how
    assert found["experts"] == EXPERTS
    assert found["others"] == TOKENS - share
    assert found["all"] == TOKENS * EXPERTS  # of a mask that no router made
    of = "a size that depends on data is {}% of all elements, as choices are balanced"
    assert {of.format(12.5), of.format(25), of.format(75)} < set(found["notes"])


def checked_by_torch() -> dict[str, Any]:
    x = torch.randn(16, 4, device="cuda")
    chosen = torch.distributions.Categorical(logits=x).sample()
    normal = torch.distributions.Normal(x, x.exp())
    found = {"shape": list(chosen.shape), "drawn": list(normal.rsample().shape)}
    found["notes"] = notes()
    deviations = torch.tensor([1.0, -1.0], device="cuda")
    try:
        torch.distributions.Normal(torch.zeros(2, device="cuda"), deviations)
    except ValueError as error:
        found["refused"] = str(error)
    return found | {"notes of it": notes()}


def test_what_torch_requires_of_values_holds():
    """Where nobody computed them; of what the host made it is known."""
    found = call_dry(checked_by_torch)
    assert (found["shape"], found["drawn"]) == ([16], [16, 4])
    taken = "what torch requires of values that nobody computed is taken to hold"
    assert found["notes"] == {taken: 3}
    assert "GreaterThan(lower_bound=0.0)" in found["refused"]
    assert "a truth value read back is False" not in found["notes of it"]


def decided() -> dict[str, Any]:
    """As a loop that generates text asks whether all sequences are done."""
    ended = torch.randn(4, device="cuda") > 0
    done = torch.full((4,), True, device="cuda") | ended
    unfinished = torch.ones(4, dtype=torch.long, device="cuda") & ~done
    undecided = torch.full((4,), False, device="cuda").logical_or(ended)
    return {
        "all": bool(done.all()),
        "most": unfinished.max().item(),
        "notes": notes(),
        "other": [bool(undecided.any()), notes()],
    }


def test_one_side_may_decide_an_or_and_an_and():
    found = call_dry(decided)
    assert (found["all"], found["most"], found["notes"]) == (True, 0, {})
    assert found["other"] == [False, {"a truth value read back is False": 1}]


def suppressed() -> dict[str, Any]:
    from torchvision.ops import nms

    boxes, scores = torch.rand(100, 4, device="cuda"), torch.rand(100, device="cuda")
    return {"kept": len(nms(boxes, scores, 0.5)), "notes": notes()}


def test_what_an_operator_of_others_fills_its_kernels_may_write():
    """torchvision's marks what it keeps in zeros that it asked for."""
    found = call_dry(suppressed)
    assert found["kept"] == 100
    assert found["notes"] == {"a size that depends on data is 100% of all elements": 1}


def repeated() -> dict[str, Any]:
    of_host = torch.tensor([1, 2, 3], device="cuda")
    counts = (torch.randn(256, device="cuda") > 0).sum(-1, keepdim=True).expand(256)
    rows = torch.randn(256, 4, device="cuda")
    return {
        "of host": len(torch.repeat_interleave(of_host, of_host)),
        "without notes": notes(),
        "others": list(rows.repeat_interleave(counts, dim=0).shape),
        "notes": notes(),
    }


def test_repeats_that_nobody_counted_are_one_each():
    found = call_dry(repeated)
    assert (found["of host"], found["without notes"]) == (6, {})
    assert found["others"] == [256, 4]
    assert found["notes"] == {"a size that depends on data is 100% of all elements": 1}


def compiled() -> list[int]:
    """A compiled program reads a value between its graphs, which is the instrument's
    Python in a frame that torch.compile watches."""
    graphs = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        if doubled.sum() > 0:
            doubled = doubled + 1
        return doubled * doubled[doubled.nonzero()[0]]

    step(torch.randn(4, device="cuda"))
    return graphs


def test_torch_compile_does_not_see_the_instrument():
    on_cuda = call_dry(compiled)
    assert 2 <= len(on_cuda) <= 4
    assert sum(on_cuda) <= 16  # of the program's four operators and their arguments
