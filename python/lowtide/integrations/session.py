"""One program that runs with lowtide's ``fully_shard``, unedited: what was bound, what
it sharded, and the memory report at its end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from lowtide._base import environment
from lowtide._base.classes import class_name
from lowtide._sharding import blocks
from lowtide._sharding.fsdp_module import FSDPModule
from lowtide._sharding.unit import unit_state
from lowtide.activations import checkpoint
from lowtide.integrations import all_or_nothing
from lowtide.integrations.binding import bind
from lowtide.integrations.deferral import Deferral
from lowtide.integrations.policy_text import parse_policy
from lowtide.integrations.replaced import Replaced
from lowtide.memory import memory_report
from lowtide.policies import ActivationPolicy

_WRAPPER = "_checkpoint_wrapped_module"  # of torch's checkpoint_wrapper


@dataclass(frozen=True)
class Options:
    """What a session does to every model that is sharded.

    Attributes:
        policy: A policy of activations, as :func:`parse_policy` reads it, for the
            repeated blocks, as ``lowtide.wrap`` finds them; they get it in the first
            forward. None leaves activations alone.
        defer_logits: The name of the head whose logits are deferred, ``""`` to find
            it. None leaves heads alone.
        all_or_nothing: Steps of the program's optimizers happen on all ranks or on
            none, see :mod:`lowtide.integrations.all_or_nothing`.
    """

    policy: str | None = None
    defer_logits: str | None = None
    all_or_nothing: bool = False


class Session:
    """Binds when it is made, until :meth:`end`; see :func:`bind`."""

    def __init__(self, options: Options = Options()) -> None:
        policy, name = options.policy, options.defer_logits
        self._policy = None if policy is None else parse_policy(policy)
        self._deferral = None if name is None else Deferral(name)
        self._rank = environment.number("RANK", 0)
        self._sharded: list[weakref.ref[nn.Module]] = []
        self._awaited: weakref.WeakKeyDictionary[nn.Module, Any] = (
            weakref.WeakKeyDictionary()
        )  # hooks that see the first forward
        self._ended: list[str] = []  # what models held that are gone
        self.num_blocks = 0  # that got it
        self.binding = bind(self._shard)
        self._undo_refusals = [_refuse_fsdp1(), _refuse_hidden()]
        self._replaced = Replaced()  # behind what is ours
        self._guards = options.all_or_nothing
        self._undo_guards = all_or_nothing.guard_all() if self._guards else lambda: None
        FSDPModule.__del__ = self._on_end_of
        # A child by fork has none of our exit functions, by design of multiprocessing.
        util.register_after_fork(self, Session._arrive_in_child)

    def end(self) -> None:
        self.binding.undo()
        for undo in self._undo_refusals:
            undo()
        self._undo_guards()
        del FSDPModule.__del__

    @property
    def has_sharded(self) -> bool:
        """In this process."""
        return bool(self._sharded)

    @property
    def is_rank_0(self) -> bool:
        """Of the group that sharded, or as the environment says."""
        return self._rank == 0

    def report_at_exit_of_child(self) -> None:
        """Processes of multiprocessing end without exit functions, but with these."""
        util.Finalize(None, self.report, exitpriority=1)

    def report(self) -> None:
        """The memory report of each model, on rank 0 of what was sharded here, on the
        standard error."""
        if not (self.is_rank_0 and self.has_sharded):
            return
        lines: list[str] = []
        try:
            for line in self._lines():
                lines.append(line)
        except Exception as error:  # the program may be ending with its own
            lines.append(f"lowtide: run: expected a report, got {error!r}.")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _arrive_in_child(self) -> None:
        self._sharded, self._ended = [], []
        if self._deferral is not None:
            self._deferral.forget()
        self.report_at_exit_of_child()

    def _shard(self, fully_shard: Callable[..., Any], module: Any, **kw: Any) -> Any:
        modules = module if isinstance(module, list | tuple) else [module]
        if self._deferral is not None:
            rest = self._deferral.shard_head(fully_shard, modules, kw)
            fully_shard(rest if modules is module else module, **kw)
        else:
            fully_shard(module, **kw)
        self._rank = dist.get_rank()
        if not self._sharded and self.is_rank_0:
            for line in self._left_out():
                print(line, file=sys.stderr, flush=True)
        for one in modules:
            self._sharded.append(weakref.ref(one))
            if self._policy is not None or self._deferral is not None:
                self._await_forward(one)
        return module

    def _await_forward(self, module: nn.Module) -> None:
        """Who runs first of a tree is its root, as for ``fully_shard``."""

        @torch.compiler.disable
        def begin(root: nn.Module, args: Any) -> None:
            for inside in root.modules():
                if (hook := self._awaited.pop(inside, None)) is not None:
                    hook.remove()
            if self._deferral is not None:
                self._deferral.defer(root, self.is_rank_0)
            if self._policy is not None:
                self.num_blocks += _give_policy(root, self._policy, self.is_rank_0)

        hook = module.register_forward_pre_hook(begin, prepend=True)
        self._awaited[module] = hook

    @property
    def _on_end_of(self) -> Callable[[Any], None]:
        """What models do at their end: most of them are gone when a program is over."""
        reference = weakref.ref(self)

        def note(module: Any) -> None:
            session = reference()
            if session is not None and session.is_rank_0 and _is_root(module):
                session._ended.append(_report(module))

        return note

    def _lines(self) -> Iterator[str]:
        users = self.binding.users()
        if users:
            yield f"lowtide: run: fully_shard of {', '.join(users)} was lowtide's"
        yield from self._left_out()
        models = [module for ref in self._sharded if (module := ref()) is not None]
        held = [*self._ended, *map(_report, filter(_is_root, models))]
        yield from held
        if self._deferral is not None:
            yield from self._deferral.lines()
        if self._guards:
            yield f"lowtide: run: --all-or-nothing: {all_or_nothing.counts.text()}"
        if not held:
            yield (
                f"lowtide: run: {len(self._sharded)} units were sharded, and no model "
                "of theirs is where it was sharded with a forward behind it"
            )

    def _left_out(self) -> Iterator[str]:
        if methods := self._replaced.methods():
            yield (
                f"lowtide: run: the program has replaced {', '.join(methods)}. lowtide "
                "does not call these methods of FSDP2's: what they do is left out. "
                "Compare with a run without lowtide."
            )


def enter(options: Options) -> None:
    """In a process that the program started: as its parent was."""
    Session(options).report_at_exit_of_child()


def _is_root(module: nn.Module) -> bool:
    """Of a tree of units that ran forward: units are named by their paths, the root by
    its class. (Weak references are gone when the collector ends a model, and so is the
    root where parameters are away.)"""
    state = unit_state(module)
    return (
        state is not None and state.explains_errors and state.name == class_name(module)
    )


def _report(root: nn.Module) -> str:
    """Says why where there is none: a model in a circle that the collector took apart,
    or a device that answers no more, must not hide how the program ended."""
    try:
        return f"lowtide: run: {class_name(root)}\n{memory_report(root)}"
    except Exception as error:
        return (
            f"lowtide: run: {class_name(root)}: expected a report of its memory, got "
            f"{error!r}. Print lowtide.memory_report(model) where the program still "
            "has it."
        )


def _give_policy(root: nn.Module, policy: ActivationPolicy, is_rank_0: bool) -> int:
    """The number of blocks that got it; see :class:`Session`."""
    name = class_name(root)
    repeated = [u.module for u in blocks.decide(root, set()).units if u.is_block]
    if not repeated:
        raise ValueError(
            f"lowtide: run: --policy: expected repeated blocks in {name}, got none. "
            "Leave the option out, and call lowtide.checkpoint on the modules you mean."
        )
    for block in repeated:
        if hasattr(block, _WRAPPER) or getattr(block, "gradient_checkpointing", False):
            raise ValueError(
                f"lowtide: run: --policy: expected blocks of {name} that the program "
                f"does not checkpoint itself, got {class_name(block)}. Turn its "
                "activation checkpointing off, or leave the option out."
            )
        checkpoint(block, policy)
    config: Any = getattr(root, "config", None)
    if getattr(config, "use_cache", False) is True:
        # As transformers does where it checkpoints: a block that runs again would find
        # its own keys in the cache.
        config.use_cache = False
        if is_rank_0:
            print(f"lowtide: run: {name}.config.use_cache = False", file=sys.stderr)
    return len(repeated)


def _refuse_fsdp1() -> Callable[[], None]:
    theirs = FullyShardedDataParallel.__init__

    def refuse(self: object, module: object = None, *args: Any, **kw: Any) -> NoReturn:
        raise NotImplementedError(
            "lowtide: run: FullyShardedDataParallel: expected fully_shard, got FSDP1 "
            f"around {type(module).__name__}. Ask the framework for FSDP2 (accelerate: "
            "fsdp_version 2; transformers: fsdp_config version 2; Lightning: "
            "ModelParallelStrategy; verl: strategy fsdp2), see "
            "docs/migration_from_fsdp1.md, or run the program without lowtide."
        )

    FullyShardedDataParallel.__init__ = refuse  # type: ignore[method-assign]

    def undo() -> None:
        FullyShardedDataParallel.__init__ = theirs  # type: ignore[method-assign]

    return undo


def _refuse_hidden() -> Callable[[], None]:
    """Of torch's ``fully_shard``, which only a program that has hidden it from
    :func:`bind` still calls."""
    theirs = FSDPState.init

    def init(
        self: FSDPState, modules: tuple[nn.Module, ...], *args: Any, **kw: Any
    ) -> None:
        if type(self) is not FSDPState:  # torch's `replicate`
            return theirs(self, modules, *args, **kw)
        raise ValueError(
            "lowtide: run: fully_shard: expected lowtide's, got torch's own for "
            f"{class_name(modules[0])}. It was hidden, in a partial, a closure or a "
            "class, before lowtide was there: take it from torch.distributed.fsdp, or "
            "from lowtide, where it is called."
        )

    FSDPState.init = init  # type: ignore[method-assign]

    def undo() -> None:
        FSDPState.init = theirs  # type: ignore[method-assign]

    return undo
