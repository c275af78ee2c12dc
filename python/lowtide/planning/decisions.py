"""Where a program decides by a number that it read, from its source.

A number is read to be shown more often than to decide, and when it is read nobody
knows yet which. So the source is asked: what the line of the read assigns, returns or
keeps in ``self`` is followed by its name, within the file, to what chooses a way: a
condition, a comparison, an assertion, a match.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class _Name(NamedTuple):
    """Local to ``scope``, a function's line; ``self.name`` and ``name()`` are known by
    their name alone, in scope 0."""

    scope: int
    name: str


def lines_that_decide(file: str, line: int) -> list[int]:
    """By what was read at ``line`` of ``file``; none without source."""
    source = _source_of(file)
    return source.decided_by(line) if source is not None else []


@functools.cache
def _source_of(file: str) -> _Source | None:
    try:
        return _Source(ast.parse(Path(file).read_text()))
    except (OSError, SyntaxError, ValueError):
        return None


class _Source:
    def __init__(self, module: ast.Module) -> None:
        # {expression or statement: the function that it is in}
        self._scopes: dict[ast.AST, int] = {}
        self._within(module, -1)
        self._choices = [
            condition for node in self._scopes for condition in _conditions(node)
        ]

    def _within(self, node: ast.AST, scope: int) -> None:
        self._scopes[node] = scope
        inner = node.lineno if isinstance(node, _FUNCTIONS) else scope
        for child in ast.iter_child_nodes(node):
            self._within(child, inner)

    def decided_by(self, line: int) -> list[int]:
        names: set[_Name] = set()
        while True:
            found = names.union(
                *(self._named(node, line, names) for node in self._scopes)
            )
            if found == names:
                break
            names = found
        return sorted(
            {
                choice.lineno
                for choice in self._choices
                if self._comes_from(choice, line, names)
            }
        )

    def _comes_from(self, node: ast.AST, line: int, names: set[_Name]) -> bool:
        """From a call at the line, which reads, or from anything that has one of the
        names."""
        if _ignores_values(node):
            return False
        if isinstance(node, ast.Call):
            if node.lineno <= line <= _end(node):
                return True
            if self._name(node.func, called=True) in names:
                return True
        return self._name(node) in names or any(
            self._comes_from(child, line, names) for child in ast.iter_child_nodes(node)
        )

    def _named(self, node: ast.AST, line: int, names: set[_Name]) -> Iterator[_Name]:
        """What has the value behind ``node``."""
        value = getattr(node, "value", None)
        if not isinstance(value, ast.expr) or not self._comes_from(value, line, names):
            return
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self._stored(target)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            yield from self._stored(node.target)
        elif isinstance(node, ast.Return):
            yield from self._functions_at(self._scopes[node])
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr in ("append", "extend", "add", "update", "insert"):
                yield from self._stored(value.func.value)

    def _stored(self, target: ast.expr) -> Iterator[_Name]:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                yield from self._stored(part)
        elif isinstance(target, (ast.Subscript, ast.Starred)):
            yield from self._stored(target.value)
        elif (name := self._name(target)) is not None:
            yield name

    def _functions_at(self, line: int) -> Iterator[_Name]:
        for node in self._scopes:
            if isinstance(node, _FUNCTIONS[:2]) and node.lineno == line:
                yield _Name(0, f"{node.name}()")
                yield _Name(0, f"self.{node.name}()")

    def _name(self, node: ast.AST, called: bool = False) -> _Name | None:
        behind = "()" if called else ""
        if isinstance(node, ast.Name):
            scope = 0 if called else self._scopes[node]
            return _Name(scope, node.id + behind)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return _Name(0, f"self.{node.attr}{behind}")
        return None


def _ignores_values(node: ast.AST) -> bool:
    """How many there are, and whether one is None, is no question of numbers; a dict of
    many, such as a checkpoint or a log's line, would lead everywhere."""
    if isinstance(node, ast.Dict):
        return True
    if isinstance(node, ast.Compare):
        return all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in ("len", "isinstance", "type")


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        yield node.test
    elif isinstance(node, ast.Compare):
        yield node
    elif isinstance(node, ast.Match):
        yield node.subject
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def _end(node: ast.expr) -> int:
    return node.lineno if node.end_lineno is None else node.end_lineno
