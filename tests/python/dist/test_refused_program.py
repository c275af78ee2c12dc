"""A program that hypothesis found and nobody has explained: legal, and refused."""

from __future__ import annotations

import pytest
import torch

from dist.test_random_steps import Steps
from support.random_steps import Pass, Setup
from support.ranks import RankPool


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="ranks are said to run units in another order")
def test_a_legal_program_is_not_refused() -> None:
    env = {"TORCH_FR_BUFFER_SIZE": "4000", "LOWTIDE_COMPARE_RANKS": "on"}
    with RankPool(2, group_timeout=20.0, env=env) as pool:
        state = type("Refused", (Steps,), {"pool": pool, "compared": True})()
        state.start(
            setup=Setup(
                wrap="blocks",
                compute=torch.float32,
                reshard=True,
                budget=1024,
                stem="rows",
                replicas=True,
                extended=True,
                offload=False,
            )
        )
        state.fail(
            number=1,
            run=Pass(
                seed=97,
                rows=(4, 3),
                scaled=((False, False, False), (False, True, False)),
                order=(0, 0),
                aside=2,
                head=False,
                checkpointed=False,
                chunks=0,
                penalty=False,
                wanted=(False, False),
                kept=(False, False),
            ),
            when="backward",
        )
        state.forward(
            run=Pass(
                seed=17,
                rows=(3, 2),
                scaled=((False, False, False), (False, True, False)),
                order=(),
                aside=1,
                head=True,
                checkpointed=False,
                chunks=1,
                penalty=True,
                wanted=(True, False),
                kept=(True, True),
            )
        )
        state.peek(
            number=1,
            run=Pass(
                seed=42,
                rows=(1, 0),
                scaled=((False, True, True), (False, False, True)),
                order=(),
                aside=0,
                head=False,
                checkpointed=True,
                chunks=0,
                penalty=False,
                wanted=(True, True),
                kept=(False, False),
            ),
        )
        state.peek(
            number=2,
            run=Pass(
                seed=84,
                rows=(3, 4),
                scaled=((False, False, True), (True, False, False)),
                order=(2, 0, 2, 0),
                aside=1,
                head=True,
                checkpointed=True,
                chunks=1,
                penalty=False,
                wanted=(False, False),
                kept=(True, True),
            ),
        )
        state.fail(
            number=2,
            run=Pass(
                seed=26,
                rows=(2, 3),
                scaled=((False, False, False), (False, True, False)),
                order=(1, 2),
                aside=1,
                head=True,
                checkpointed=True,
                chunks=2,
                penalty=False,
                wanted=(False, True),
                kept=(True, False),
            ),
            when="backward",
        )
        state.load(assign=False)
        state.fail(
            number=0,
            run=Pass(
                seed=37,
                rows=(0, 4),
                scaled=((True, False, True), (False, False, False)),
                order=(0, 0, 2),
                aside=1,
                head=False,
                checkpointed=True,
                chunks=2,
                penalty=False,
                wanted=(False, False),
                kept=(True, False),
            ),
            when="forward",
        )
        state.fail(
            number=0,
            run=Pass(
                seed=36,
                rows=(1, 3),
                scaled=((False, False, False), (False, True, False)),
                order=(0, 0),
                aside=None,
                head=False,
                checkpointed=False,
                chunks=2,
                penalty=True,
                wanted=(False, True),
                kept=(False, True),
            ),
            when="forward",
        )
        state.microbatch(
            kept=(False, False),
            run=Pass(
                seed=95,
                rows=(4, 0),
                scaled=((True, True, True), (False, True, True)),
                order=(2, 0, 0, 0),
                aside=2,
                head=True,
                checkpointed=True,
                chunks=0,
                penalty=True,
                wanted=(False, True),
                kept=(True, False),
            ),
            sync=(True, True, True, True),
        )
        state.forward(
            run=Pass(
                seed=64,
                rows=(2, 2),
                scaled=((True, True, True), (True, True, True)),
                order=(1, 2),
                aside=2,
                head=False,
                checkpointed=True,
                chunks=2,
                penalty=False,
                wanted=(False, False),
                kept=(False, True),
            )
        )
        state.microbatch(
            kept=(False, False),
            run=Pass(
                seed=46,
                rows=(1, 3),
                scaled=((False, False, False), (True, False, False)),
                order=(2, 2, 1, 0),
                aside=0,
                head=False,
                checkpointed=False,
                chunks=2,
                penalty=False,
                wanted=(False, True),
                kept=(False, False),
            ),
            sync=(True, True, True, True),
        )
        state.peek(
            number=0,
            run=Pass(
                seed=79,
                rows=(0, 4),
                scaled=((False, True, False), (False, False, True)),
                order=(2, 0),
                aside=None,
                head=False,
                checkpointed=True,
                chunks=1,
                penalty=True,
                wanted=(True, False),
                kept=(True, True),
            ),
        )
        state.peek(
            number=0,
            run=Pass(
                seed=34,
                rows=(0, 4),
                scaled=((False, False, False), (True, True, True)),
                order=(),
                aside=0,
                head=False,
                checkpointed=False,
                chunks=1,
                penalty=False,
                wanted=(False, False),
                kept=(False, False),
            ),
        )
        state.microbatch(
            kept=(False, False),
            run=Pass(
                seed=92,
                rows=(0, 2),
                scaled=((False, False, False), (True, True, True)),
                order=(0, 2, 2, 1),
                aside=2,
                head=False,
                checkpointed=False,
                chunks=1,
                penalty=True,
                wanted=(True, False),
                kept=(False, True),
            ),
            sync=(True, True, True, True),
        )
        state.forward(
            run=Pass(
                seed=70,
                rows=(1, 1),
                scaled=((False, False, False), (False, True, False)),
                order=(2,),
                aside=None,
                head=True,
                checkpointed=False,
                chunks=2,
                penalty=True,
                wanted=(False, True),
                kept=(True, False),
            )
        )
        state.forward(
            run=Pass(
                seed=0,
                rows=(2, 3),
                scaled=((True, True, True), (False, True, True)),
                order=(2, 0, 1),
                aside=None,
                head=False,
                checkpointed=True,
                chunks=1,
                penalty=True,
                wanted=(True, True),
                kept=(False, False),
            )
        )
        state.peek(
            number=0,
            run=Pass(
                seed=67,
                rows=(4, 4),
                scaled=((False, False, True), (False, True, True)),
                order=(),
                aside=None,
                head=True,
                checkpointed=False,
                chunks=0,
                penalty=True,
                wanted=(True, False),
                kept=(True, True),
            ),
        )
        state.peek(
            number=2,
            run=Pass(
                seed=20,
                rows=(4, 1),
                scaled=((True, True, True), (False, False, True)),
                order=(0, 0),
                aside=None,
                head=False,
                checkpointed=False,
                chunks=0,
                penalty=True,
                wanted=(False, False),
                kept=(False, True),
            ),
        )
        state.peek(
            number=0,
            run=Pass(
                seed=92,
                rows=(4, 0),
                scaled=((True, True, False), (True, True, False)),
                order=(1, 0, 0, 2),
                aside=2,
                head=True,
                checkpointed=False,
                chunks=2,
                penalty=True,
                wanted=(False, True),
                kept=(True, True),
            ),
        )
        state.teardown()
