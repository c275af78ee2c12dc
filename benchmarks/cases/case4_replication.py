"""Case 4: an opaque kernel in a region, and the all-reduce nobody wrote."""

from __future__ import annotations

from typing import Any

from case import Case, Row, rows_of
from replication import MANY, TIMES, cost, on_rank

from support.ranks import RankPool

NAME = "case4_replication"
WORLD = 8
RULE_LINE = 'lowtide.spmd.register_rule("case4::kernel", lowtide.spmd.LOCAL)'
# jax issue 21855: what the compiler did.
PUBLISHED = {"jax, checks off": 1, "jax, with a rule": 0}
Seen = dict[str, dict[str, Any]]


def measure() -> list[Row]:
    with RankPool(WORLD) as pool:
        ranks: list[Seen] = pool.run(on_rank, timeout=300)
        microseconds = pool.run(cost, timeout=300)[0]
    return [*rows(ranks), *cost_rows(microseconds)]


def rows(ranks: list[Seen]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for system in ranks[0]:
        each = [seen[system] for seen in ranks]
        calls = sum(count for seen in each for count, _ in seen["sent"].values())
        sent = sum(size for seen in each for _, size in seen["sent"].values())
        raised = sum(bool(seen["message"]) for seen in each)
        result += [
            row(system, "ranks of 8 that raise", raised, "", "measured"),
            row(system, "collectives in backward, 8 ranks", calls, "", "measured"),
            row(system, "their bytes, 8 ranks", sent, "B", "measured"),
        ]
        if not raised:
            right = all(seen["right"] for seen in each)
            quantity = "gradients equal the formula's bit for bit"
            result.append(row(system, quantity, right, "", "measured"))
    result += [
        row(system, "collectives in backward, 8 ranks", WORLD * calls, "", "published")
        for system, calls in PUBLISHED.items()
    ]
    reduces = "LOCAL, but backward reduces"
    result += says(ranks, "no rule", "the message has the line to write", [RULE_LINE])
    result += says(
        ranks,
        reduces,
        "the message names operator, axis, value and bytes",
        ["case4::reduces", "over 'model'", "bfloat16[1, 128] (256 B)"],
    )
    result += says(
        ranks,
        "the same, replicas compared",
        "the message names operator and axis",
        ["case4::differs", "equal over 'model'"],
    )
    modes = sum(seen[reduces]["modes"] for seen in ranks)
    quantity = "seen by torch's CommDebugMode around forward"
    return [*result, row(reduces, quantity, modes, "", "measured")]


def says(ranks: list[Seen], system: str, quantity: str, words: list[str]) -> list[Row]:
    messages = [seen[system]["message"] for seen in ranks]
    found = all(word in message for message in messages for word in words)
    return [rows_of(NAME)(system, quantity, found, "", "measured")]


def cost_rows(added: dict[str, tuple[float, float]]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for name, way in {"LOCAL": "checked", "check=False": "unchecked"}.items():
        once, each = (round(us, 1) for us in added[way])
        result += [
            row(name, "host time a region adds", once, "us", "measured"),
            row(name, "and each further operator in it", each, "us", "measured"),
        ]
    return result


CASE = Case(
    name=NAME,
    describe="An opaque kernel inside a region, mesh 4 x 2 (jax 21855).",
    how=f"""\
`programs/replication.py` on {WORLD} gloo processes: a custom operator (tanh, bf16
[1, 128]) that torch does not look into, V along "data" and R along "model". *No rule*:
registered nowhere. *LOCAL*: registered, and right. *But backward reduces*: its
backward does what the report's compiler did, an all-reduce over the second axis and a
factor of 1/2. *But ranks differ*: its values depend on the rank along "model", which
only the comparison of replicas can see. Collectives are counted in C++ where they are
issued. Published: per rank one all-reduce with checks off, none with a rule. Host
time: CPU time of forward and backward with 2 and with {MANY} small operators, both axes
looked at, in turns, median of {TIMES}; one rank of 8 busy ones.""",
    run=measure,
)
