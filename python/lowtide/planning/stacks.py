"""Python call stacks of allocations: interned while a program runs, read afterwards."""

import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_Frame = tuple[CodeType, int]  # and the offset of the instruction that runs
_CALL = nn.Module._wrapped_call_impl.__code__

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PLANNING = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep
_COMPILED = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "<")


def _owners() -> dict[CodeType, str]:
    """Methods of FSDP2 -> the attribute of their ``self`` that says what they are
    about. Internals of torch: where they are missing, so is the name."""
    result = {}
    for owner, methods, attribute in (
        (
            FSDPParam,
            ("init_all_gather_outputs", "alloc_all_gather_outputs"),
            "_param_fqn",
        ),
        (
            FSDPParamGroup,
            ("unshard", "wait_for_unshard", "post_backward"),
            "_module_fqn",
        ),
    ):
        for name in methods:
            method = inspect.unwrap(getattr(owner, name, _owners))
            result[method.__code__] = attribute
    return result


_OWNERS = _owners()


class StackTable:
    """Numbers for call stacks, innermost frame first. One table for a program."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[_Frame, ...], int] = {}
        self._stacks: list[tuple[_Frame, ...]] = []

    def add(self, frame: FrameType | None) -> tuple[int, list[nn.Module], str]:
        """The number of the stack that ends at ``frame``; the modules that are being
        called on it, innermost first; the parameter or unit that FSDP2 works on."""
        frames: list[_Frame] = []
        modules: list[nn.Module] = []
        owner = ""
        while frame is not None:
            if frame.f_code is _CALL:
                modules.append(frame.f_locals["self"])
            elif not owner and frame.f_code in _OWNERS:
                this = frame.f_locals["self"]
                owner = getattr(this, _OWNERS[frame.f_code], None) or ""
            frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        stack = tuple(frames)
        number = self._numbers.setdefault(stack, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(stack)
        return number, modules, owner

    def lines(self, number: int) -> list["Line"]:
        """Innermost first."""
        lines = (Line.of(*frame) for frame in self._stacks[number])
        return [line for line in lines if not line.file.startswith(_PLANNING)]


@dataclass(frozen=True)
class Line:
    file: str
    line: int
    function: str

    @staticmethod
    @functools.cache
    def of(code: CodeType, offset: int) -> "Line":
        name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        return Line(code.co_filename, _line_of(code, offset), name)

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line} {self.function}"

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_in_torch(self) -> bool:
        return self.file.startswith(_TORCH)

    @property
    def is_in_program(self) -> bool:
        """Neither torch, or what it compiled, nor lowtide nor Python's own library."""
        if self.file.startswith((_TORCH, _OWN, _COMPILED, "<")):
            return False
        return self.file.startswith(_INSTALLED) or not self.file.startswith(_STANDARD)


def program_line(lines: list[Line]) -> Line | None:
    """The innermost line of the user's program or of a library it uses."""
    return next((line for line in lines if line.is_in_program), None)


def _line_of(code: CodeType, offset: int) -> int:
    line = code.co_firstlineno
    for start, end, number in _line_table(code):
        if start <= offset < end:
            return number or line
    return line


def _line_table(code: CodeType) -> Iterator[tuple[int, int, int | None]]:
    return code.co_lines()


def short(file: str) -> str:
    for place in (_INSTALLED, os.path.dirname(os.path.dirname(_TORCH)) + os.sep):
        if file.startswith(place):
            return file.removeprefix(place)
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else file
