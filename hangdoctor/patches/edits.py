"""The two edits, by structure: what is looked for, and what goes beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import libcst as cst
from libcst import matchers as m

from hangdoctor.patches import COMPANION, PatchRefusedError

_Node = TypeVar("_Node", bound=cst.CSTNode)
Body = Sequence[cst.BaseStatement]

MODEL_CLASS = "DeepseekV2Model"
CAUSAL_CLASS = "DeepseekV2ForCausalLM"
_HINT = "nothing was changed; hangdoctor patch list names the releases that were tried"
_MODULE = COMPANION.removesuffix(".py")

_IMPORT = "from sglang.srt.models.{module} import {names}  # {name}\n"
_V1_INIT = """\
if hs_dump_layers(config):  # {name}
    self.capture_aux_hidden_states = True
    self.model.layers_to_capture = hs_dump_layers(config)
    self._hs_dump = make_hs_dump("{name}", self.model, config)
"""
_V1_DUMP = """\
if getattr(self, "_hs_dump", None) is not None and not torch.compiler.is_compiling():  # {name}
    self._hs_dump.dump_captured(
        input_ids,
        positions,
        forward_batch,
        self.model.layers_to_capture,
        aux_hidden_states,
        hidden_states,
    )
"""
_V2_INIT = 'self._hs_dump = make_hs_dump("{name}", self, config)  # {name}\n'
# Dynamo takes the second condition for a constant, so that nothing of it is in a compiled graph.
# A subclass with an __init__ of its own has no _hs_dump, and dumps nothing.
_V2_BEGIN = (
    "hs_batch = None  # {name}\n",
    """\
if getattr(self, "_hs_dump", None) is not None and not torch.compiler.is_compiling():  # {name}
    hs_batch = self._hs_dump.begin(input_ids, positions, forward_batch)
""",
)
_V2_CAPTURE = """\
if hs_batch is not None:  # {name}
    hs_batch.capture(i, hidden_states, residual)
"""
_V2_FINISH_STAGE = """\
if hs_batch is not None:  # {name}
    hs_batch.finish(None)
"""
_V2_FINISH = """\
if hs_batch is not None:  # {name}
    hs_batch.finish(hidden_states)
"""
_PARTS = {
    "hs-dump-v1": (
        _IMPORT.replace("{names}", "hs_dump_layers, make_hs_dump"),
        _V1_INIT,
        _V1_DUMP,
    ),
    "hs-dump-v2": (
        _IMPORT.replace("{names}", "make_hs_dump"),
        _V2_INIT,
        *_V2_BEGIN,
        _V2_CAPTURE,
        _V2_FINISH_STAGE,
        _V2_FINISH,
    ),
}
"""What each patch adds, in the order of the file."""


def apply(name: str, source: str) -> tuple[str, bool]:
    """Return the text with a patch in it, and whether it was there before.

    Raises:
        PatchRefusedError: with the anchor that is missing, or what else is in the way.
    """
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise PatchRefusedError(
            f"a syntax error in line {error.raw_line}: this Python cannot be read",
            hint="restore the file of the installed release, then apply the patch",
        ) from None
    _refuse_what_is_no_model(module)
    there = [text for _, _, text in marked(name, source)]
    expected = [_unindented(part) for part in _filled(name)]
    if there == expected:
        return source, True
    if there:
        raise PatchRefusedError(
            f"lines of {name} are there already, but not as this hangdoctor writes them "
            f"({len(there)} places, {len(expected)} expected)",
            hint="hangdoctor patch revert FILE, or restore the file of the installed release",
        )
    _refuse_other_patches(source, module)
    edit = {"hs-dump-v1": _edit_v1, "hs-dump-v2": _edit_v2}[name]
    return edit(module, _filled(name)).code, False


def marked(name: str, source: str) -> list[tuple[str, int, str]]:
    r"""Return a patch's statements in a text: scope, line number and text of each.

    >>> marked("hs-dump-v2", "class A:\n    def f(self):\n        x = 1  # hs-dump-v2\n")
    [('A.f', 3, 'x = 1')]
    """
    lines = source.splitlines()
    found = []
    scopes: list[tuple[int, str]] = []
    for index, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if opened := re.match(r"\s*(?:class|def)\s+(\w+)", line):
            scopes = [scope for scope in scopes if scope[0] < indent]
            scopes.append((indent, opened[1]))
        if line.endswith(f"  # {name}"):
            end = index + 1
            while end < len(lines) and lines[end].startswith(" " * (indent + 1)):
                end += 1
            if end < len(lines) and lines[end] == " " * indent + ")":
                end += 1
            scope = ".".join(of for at, of in scopes if at < indent)
            text = "\n".join(part[indent:] for part in lines[index:end])
            found.append((scope, index + 1, text.replace(f"  # {name}", "", 1)))
    return found


def _filled(name: str) -> list[str]:
    return [part.replace("{module}", _MODULE).replace("{name}", name) for part in _PARTS[name]]


def _unindented(part: str) -> str:
    return re.sub(r"  # hs-dump-\w+$", "", part, count=1, flags=re.MULTILINE).rstrip("\n")


def _refuse_what_is_no_model(module: cst.Module) -> None:
    names = {node.name.value for node in module.body if isinstance(node, cst.ClassDef)}
    if missing := {MODEL_CLASS, CAUSAL_CLASS} - names:
        raise PatchRefusedError(
            f"this is no deepseek_v2.py of SGLang: it has no class {min(missing)}",
            hint="name sglang/srt/models/deepseek_v2.py, or its environment with --python",
        )


def _refuse_other_patches(source: str, module: cst.Module) -> None:
    for number, line in enumerate(source.splitlines(), 1):
        if other := re.search(r"# (hs-dump-v\d+)$", line):
            raise PatchRefusedError(
                f"{other[1]} is in it (line {number}), and only one of them can be",
                hint="hangdoctor patch revert FILE, then apply the other",
            )
        if re.search(r"hs_dump|HS_DUMP", line):
            raise PatchRefusedError(
                f"already patched by something else: line {number} is {line.strip()[:80]!r}",
                hint="restore the file of the installed release, then apply the patch",
            )
    init = _method(_class(module, CAUSAL_CLASS), "__init__")
    for node in m.findall(init, m.Assign(targets=[m.AtLeastN(n=1)])):
        assert isinstance(node, cst.Assign)  # noqa: S101  # what the matcher finds
        if _is_self_attribute(
            node.targets[0].target, "capture_aux_hidden_states"
        ) and not m.matches(node.value, m.Name("False")):
            raise PatchRefusedError(
                f"already patched by something else: {CAUSAL_CLASS}.__init__ sets "
                "capture_aux_hidden_states",
                hint="restore the file of the installed release, then apply the patch",
            )


def _edit_v1(module: cst.Module, parts: list[str]) -> cst.Module:
    import_, init, dump = (_statement(module, part) for part in parts)
    causal = _class(module, CAUSAL_CLASS)
    edited = _edit_method(
        causal,
        "__init__",
        lambda body: _after(
            body,
            lambda node: _assigns_to_self(node, "capture_aux_hidden_states"),
            [init],
            f"the line self.capture_aux_hidden_states = False in {CAUSAL_CLASS}.__init__",
        ),
    )
    edited = _edit_method(
        edited,
        "forward",
        lambda body: _nested_after(
            body,
            lambda node: _unpacks(node, ("hidden_states", "aux_hidden_states"), "hidden_states"),
            [dump],
            f"the line hidden_states, aux_hidden_states = hidden_states in {CAUSAL_CLASS}.forward",
        ),
    )
    _need_parameters(edited, ("input_ids", "positions", "forward_batch"))
    return _with_import(_with_class(module, causal, edited), import_)


def _edit_v2(module: cst.Module, parts: list[str]) -> cst.Module:
    import_, init, none, begin, capture, stage_end, end = (
        _statement(module, part) for part in parts
    )
    model = _class(module, MODEL_CLASS)
    edited = _edit_method(model, "__init__", lambda body: [*body, init])
    edited = _edit_method(
        edited,
        "forward",
        lambda body: _v2_forward(body, [none, begin], capture, stage_end, end),
    )
    _need_parameters(edited, ("input_ids", "positions", "forward_batch"))
    return _with_import(_with_class(module, model, edited), import_)


def _v2_forward(
    body: Body,
    begin: list[cst.BaseStatement],
    capture: cst.BaseStatement,
    stage_end: cst.BaseStatement,
    end: cst.BaseStatement,
) -> list[cst.BaseStatement]:
    scope = f"{MODEL_CLASS}.forward"
    loop = _only(
        [node for node in body if _is_layer_loop(node)],
        f"the loop over the layers (layer = self.layers[i]) in {scope}",
    )
    if not m.findall(loop, m.Assign(targets=[m.AssignTarget(_names("hidden_states", "residual"))])):
        raise _missing(
            f"hidden_states, residual, ... = layer(...) in {scope}: from SGLang 0.5.21 on a layer "
            "returns no residual, and what it returns may still owe a reduction"
        )
    stage = _only(
        [node for node in body if _is_stage_return(node)],
        f"if not self.pp_group.is_last_rank: with its return in {scope}",
    )
    tail = _start_of_returns(body)
    if tail is None or body.index(stage) >= tail or body.index(loop) >= body.index(stage):
        raise _missing(f"the return after the final norm as the last lines of {scope}")
    assert isinstance(loop, cst.For)  # noqa: S101  # as _is_layer_loop says
    assert isinstance(stage, cst.If)  # noqa: S101  # as _is_stage_return says
    result: list[cst.BaseStatement] = []
    for index, node in enumerate(body):
        if node is loop:
            inner = _nested_before(
                loop.body.body,  # type: ignore[arg-type]  # an indented block holds statements
                _takes_layer,
                [capture],
                f"layer = self.layers[i] in the loop of {scope}",
            )
            result += [*begin, loop.with_changes(body=loop.body.with_changes(body=inner))]
        elif node is stage:
            *before, last = stage.body.body
            block = [*before, stage_end, last]
            result.append(stage.with_changes(body=stage.body.with_changes(body=block)))
        else:
            result += [end, node] if index == tail else [node]
    return result


def _start_of_returns(body: Body) -> int | None:
    """Return where the returns at the end begin: the last one, and ifs that only return."""
    if not m.matches(body[-1], m.SimpleStatementLine(body=[m.Return()])):
        return None
    index = len(body)
    while index and _only_returns(body[index - 1]):
        index -= 1
    return index


def _only_returns(node: cst.BaseStatement) -> bool:
    if isinstance(node, cst.If):
        return node.orelse is None and all(
            _only_returns(part)
            for part in node.body.body
            if isinstance(part, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
        )
    return m.matches(node, m.SimpleStatementLine(body=[m.Return()]))


def _is_layer_loop(node: cst.BaseStatement) -> bool:
    return m.matches(node, m.For(target=m.Name("i"))) and any(
        _takes_layer(inner) for inner in _statements(node)
    )


def _is_stage_return(node: cst.BaseStatement) -> bool:
    last_rank = m.Attribute(m.Attribute(m.Name("self"), m.Name("pp_group")), m.Name("is_last_rank"))
    return m.matches(
        node, m.If(test=m.UnaryOperation(operator=m.Not(), expression=last_rank))
    ) and m.matches(
        node,
        m.If(body=m.IndentedBlock(body=[m.ZeroOrMore(), m.SimpleStatementLine([m.Return()])])),
    )


def _takes_layer(node: cst.CSTNode) -> bool:
    layer = m.Subscript(
        value=m.Attribute(m.Name("self"), m.Name("layers")),
        slice=[m.SubscriptElement(m.Index(m.Name("i")))],
    )
    return m.matches(
        node,
        m.SimpleStatementLine([m.Assign(targets=[m.AssignTarget(m.Name())], value=layer)]),
    )


def _assigns_to_self(node: cst.CSTNode, attribute: str) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and len(node.body) == 1
        and isinstance(assign := node.body[0], cst.Assign)
        and _is_self_attribute(assign.targets[0].target, attribute)
    )


def _is_self_attribute(node: cst.CSTNode, attribute: str) -> bool:
    return m.matches(node, m.Attribute(m.Name("self"), m.Name(attribute)))


def _unpacks(node: cst.CSTNode, names: tuple[str, ...], value: str) -> bool:
    return m.matches(
        node,
        m.SimpleStatementLine(
            [m.Assign(targets=[m.AssignTarget(_names(*names))], value=m.Name(value))]
        ),
    )


def _names(*names: str) -> m.Tuple:
    """Match a tuple that begins with these names."""
    return m.Tuple([*(m.Element(m.Name(name)) for name in names), m.ZeroOrMore()])


def _statements(node: cst.CSTNode) -> list[cst.CSTNode]:
    return list(m.findall(node, m.SimpleStatementLine()))


def _statement(module: cst.Module, text: str) -> cst.BaseStatement:
    statement = cst.parse_statement(text, config=module.config_for_parsing)
    assert not isinstance(statement, cst.EmptyLine)  # noqa: S101  # ours are none
    return statement


def _class(module: cst.Module, name: str) -> cst.ClassDef:
    return next(
        node for node in module.body if isinstance(node, cst.ClassDef) and node.name.value == name
    )


def _method(class_: cst.ClassDef, name: str) -> cst.FunctionDef:
    for node in class_.body.body:
        if isinstance(node, cst.FunctionDef) and node.name.value == name:
            return node
    raise _missing(f"the method {name} of {class_.name.value}")


def _edit_method(
    class_: cst.ClassDef, name: str, edit: Callable[[Body], list[cst.BaseStatement]]
) -> cst.ClassDef:
    method = _method(class_, name)
    changed = method.with_changes(
        body=method.body.with_changes(
            body=edit(method.body.body)  # type: ignore[arg-type]  # as above
        )
    )
    parts = [changed if node is method else node for node in class_.body.body]
    return class_.with_changes(body=class_.body.with_changes(body=parts))


def _need_parameters(class_: cst.ClassDef, names: tuple[str, ...]) -> None:
    for method, needed in (("__init__", ("config",)), ("forward", names)):
        there = {parameter.name.value for parameter in _method(class_, method).params.params}
        for name in needed:
            if name not in there:
                raise _missing(f"the parameter {name} of {class_.name.value}.{method}")


def _with_class(module: cst.Module, old: cst.ClassDef, new: cst.ClassDef) -> cst.Module:
    return module.with_changes(body=[new if node is old else node for node in module.body])


def _with_import(module: cst.Module, statement: cst.BaseStatement) -> cst.Module:
    body = list(module.body)
    if not any(m.matches(node, _import_of("torch")) for node in body):
        raise _missing("import torch")
    at = [
        index
        for index, node in enumerate(body)
        if isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.ImportFrom)
        and module.code_for_node(node.body[0]).startswith("from sglang.")
    ]
    if not at:
        raise _missing("an import from sglang at the top")
    return module.with_changes(body=[*body[: at[-1] + 1], statement, *body[at[-1] + 1 :]])


def _import_of(name: str) -> m.SimpleStatementLine:
    return m.SimpleStatementLine([m.Import(names=[m.ImportAlias(name=m.Name(name), asname=None)])])


def _after(
    body: Body,
    is_anchor: Callable[[cst.CSTNode], bool],
    added: list[cst.BaseStatement],
    anchor: str,
) -> list[cst.BaseStatement]:
    found = _only([node for node in body if is_anchor(node)], anchor)
    at = body.index(found) + 1
    return [*body[:at], *added, *body[at:]]


def _nested_after(
    body: Body,
    is_anchor: Callable[[cst.CSTNode], bool],
    added: list[cst.BaseStatement],
    anchor: str,
) -> list[cst.BaseStatement]:
    return _nested(body, is_anchor, lambda found: [found, *added], anchor)


def _nested_before(
    body: Body,
    is_anchor: Callable[[cst.CSTNode], bool],
    added: list[cst.BaseStatement],
    anchor: str,
) -> list[cst.BaseStatement]:
    return _nested(body, is_anchor, lambda found: [*added, found], anchor)


def _nested(
    body: Body,
    is_anchor: Callable[[cst.CSTNode], bool],
    replace: Callable[[cst.BaseStatement], list[cst.BaseStatement]],
    anchor: str,
) -> list[cst.BaseStatement]:
    """Replace the one statement that is an anchor, however deep it lies."""
    _only([inner for node in body for inner in _statements(node) if is_anchor(inner)], anchor)

    class Replace(cst.CSTTransformer):
        def leave_SimpleStatementLine(  # noqa: N802  # LibCST's name
            self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
        ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
            if is_anchor(original_node):
                return cst.FlattenSentinel(replace(updated_node))
            return updated_node

    changed: list[cst.BaseStatement] = []
    for node in body:
        if is_anchor(node):
            changed += replace(node)
        else:
            visited = node.visit(Replace())
            assert isinstance(visited, cst.BaseStatement)  # noqa: S101  # none is removed
            changed.append(visited)
    return changed


def _only(found: list[_Node], anchor: str) -> _Node:
    if len(found) != 1:
        raise _missing(anchor if not found else f"{anchor} once (it is there {len(found)} times)")
    return found[0]


def _missing(anchor: str) -> PatchRefusedError:
    return PatchRefusedError(f"this release is built differently: not found: {anchor}", hint=_HINT)
