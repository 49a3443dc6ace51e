"""Source text as a tree, and which of its statements a patch brought in.

The tree is the standard library's: comments and layout do not matter here, line numbers do, and
LibCST, which keeps the former, takes seconds for a model file of three thousand lines.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections import Counter
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BYTES = 4_000_000
"""SGLang's longest model file has 0.15 MB."""


_WITH_ONE_BODY = (ast.With, ast.AsyncWith, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Statement(NamedTuple):
    """One statement, without the statements inside it.

    Attributes:
        node: the statement.
        scope: the functions and classes around it, dotted.
        text: its own source, or its head where others stand inside, laid out one way.
        under: texts of the conditions and loops around it in its function.
    """

    node: ast.stmt
    scope: str
    text: str
    under: tuple[str, ...]


class Source:
    """One file.

    Attributes:
        name: as it is shown beside a line number.
        module: its dotted name, empty where not known.
        tree: the module.
        statements: all of them, in the order of the text.
        new: ids of the statement nodes that stock does not have.
        gone: stock's statements that this file no longer has.
    """

    def __init__(self, name: str, module: str, tree: ast.Module) -> None:
        self.name = name
        self.module = module
        self.tree = tree
        self.statements = tuple(_statements(tree.body, "", ()))
        self.new: frozenset[int] = frozenset()
        self.gone: tuple[Statement, ...] = ()
        self.moved_under: tuple[tuple[Statement, Statement], ...] = ()

    @functools.cached_property
    def called(self) -> frozenset[str]:
        """Return the last names of all that is called anywhere in it."""
        calls = (node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return frozenset(getattr(func, "id", getattr(func, "attr", "")) for func in calls)


def parse(text: str, name: str, module: str = "") -> Source:
    """Return the source of a Python file.

    Raises:
        InputError: it is too large, or no Python that this interpreter reads; with the line.
    """
    hint = f"what Python itself says: python -m py_compile {name}"
    if len(text) > MOST_BYTES:
        what = f"{name} is too long for a model file: {len(text)} characters"
        raise InputError(what, hint="name sglang/srt/models/deepseek_v2.py with the patch in it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the file's own business
            tree = ast.parse(text)
        return Source(name, module, tree)
    except SyntaxError as error:
        raise InputError(
            f"{name}:{error.lineno or 1}: not Python: {error.msg}", hint=hint
        ) from None
    except (RecursionError, MemoryError):
        raise InputError(f"{name} is nested too deeply to be read", hint=hint) from None
    except ValueError as error:  # a NUL
        raise InputError(f"{name}: not Python: {error}", hint=hint) from None


def compare(patched: Source, stock: Source | None) -> Source:
    """Mark what is new in a patched file, what is gone, and what stands under other conditions.

    Statements are compared by their source laid out one way, so that comments, line breaks and
    quotes do not count; one that was only moved is not new.
    """
    if stock is None:
        patched.new = frozenset(id(one.node) for one in patched.statements)
        return patched
    old, now = list(stock.statements), list(patched.statements)
    first = 0
    while first < min(len(old), len(now)) and old[first].text == now[first].text:
        first += 1
    end = 0
    while end < min(len(old), len(now)) - first and old[-1 - end].text == now[-1 - end].text:
        end += 1
    middle_old, middle_now = old[first : len(old) - end], now[first : len(now) - end]
    matcher = SequenceMatcher(
        None, [one.text for one in middle_old], [one.text for one in middle_now], autojunk=False
    )
    pairs = [(old[at], now[at]) for at in range(first)]
    pairs += [(old[len(old) - 1 - at], now[len(now) - 1 - at]) for at in range(end)]
    added: list[Statement] = []
    gone: list[Statement] = []
    for tag, from_old, to_old, from_now, to_now in matcher.get_opcodes():
        if tag == "equal":
            pairs += zip(middle_old[from_old:to_old], middle_now[from_now:to_now], strict=True)
        else:
            gone += middle_old[from_old:to_old]
            added += middle_now[from_now:to_now]
    # Only moved, such as into a function of its own.
    spare = Counter(one.text for one in gone)
    new: list[Statement] = []
    for one in added:
        if spare[one.text]:
            spare[one.text] -= 1
        else:
            new.append(one)
    left: list[Statement] = []
    for one in gone:
        if spare[one.text]:
            spare[one.text] -= 1
            left.append(one)
    patched.new = frozenset(id(one.node) for one in new)
    patched.gone = tuple(left)
    patched.moved_under = tuple(
        (before, after)
        for before, after in pairs
        if before.scope == after.scope and _added_condition(before.under, after.under)
    )
    return patched


def head(node: ast.stmt) -> str:
    """Return a statement's source, or its first line where others stand inside."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}({ast.unparse(node.args)})"
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    if isinstance(node, ast.While):
        return f"while {ast.unparse(node.test)}"
    if isinstance(node, ast.For | ast.AsyncFor):
        return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    if isinstance(node, ast.With | ast.AsyncWith):
        return "with " + ", ".join(ast.unparse(item) for item in node.items)
    if isinstance(node, ast.Match):
        return f"match {ast.unparse(node.subject)}"
    if isinstance(node, ast.Try):
        kinds = ", ".join(ast.unparse(one.type) if one.type else "" for one in node.handlers)
        return f"try except {kinds}"
    return ast.unparse(node)


def blocks(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the lists of statements inside a statement, with the condition of each."""
    if isinstance(node, ast.If):
        text = ast.unparse(node.test)
        yield f"if {text}", node.body
        yield f"if not ({text})", node.orelse
    elif isinstance(node, ast.Match):
        for case in node.cases:
            yield f"{head(node)} case {ast.unparse(case.pattern)}", case.body
    elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
        yield "", node.body  # type: ignore[attr-defined]
        for handler in node.handlers:  # type: ignore[attr-defined]
            yield "except", handler.body
        yield "", node.orelse  # type: ignore[attr-defined]
        yield "", node.finalbody  # type: ignore[attr-defined]
    elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
        yield head(node), node.body
        yield "", node.orelse
    elif isinstance(node, _WITH_ONE_BODY):
        yield "", node.body


def _statements(body: list[ast.stmt], scope: str, under: tuple[str, ...]) -> Iterator[Statement]:
    for node in body:
        yield Statement(node, scope, head(node), under)
        inner, around = scope, under
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner, around = f"{scope}.{node.name}".lstrip("."), ()
        for condition, statements in blocks(node):
            yield from _statements(statements, inner, (*around, condition) if condition else around)


def _added_condition(before: tuple[str, ...], after: tuple[str, ...]) -> bool:
    return before != after and len(after) > len(before)
