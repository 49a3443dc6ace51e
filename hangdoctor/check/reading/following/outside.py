"""What a call of code outside these files is, what it waits for and touches, and what it gives."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.nodes import at, dotted
from hangdoctor.check.reading.following.walk import evaluate_again, options
from hangdoctor.check.reading.values import (
    NO_LABELS,
    NONE,
    Const,
    Labels,
    Seq,
    Sym,
    Value,
    is_tensor,
    labels_of,
    name_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk


class Call(NamedTuple):
    """A call of something that these files do not define.

    Attributes:
        node: the call.
        func: what is called; name: its dotted name; tail: the last part of that.
        receiver: whose method it is; None for a plain function.
        args, keywords: what is given.
    """

    node: ast.Call
    func: Value
    name: str
    tail: str
    receiver: Value | None
    args: list[Value]
    keywords: dict[str, Value]

    @property
    def given(self) -> list[Value]:
        """All that is given, by position or by name."""
        return [*self.args, *self.keywords.values()]


def group_argument(call: Call) -> str:
    """Return what a call's arguments tell of the group of ranks that it is for."""
    text = ", ".join(
        [ast.unparse(one.value) for one in call.node.keywords if one.arg in ("group", "pg")]
        + [
            f"{text_of(one)} {name_of(one)}"
            for key, one in call.keywords.items()
            if key in ("group", "pg")
        ]
    )
    return f"group {text}" if text and call.name.startswith("torch.distributed.") else text


def gathered(walk: Walk, call: Call, group: words.Group, state: State) -> Value | None:
    """Note a collective, and return what it gives; None where the call is none."""
    if not (op := words.collective(call.name)):
        return None
    walk.event("collective", f"{op}\0{call.name}", call.node, state.guards, group=group)
    key, name = f"{op} {at(call.node)}", f"{call.name}()"
    return Sym(key, name, NO_LABELS, tensor=True, present=True)


def note_effects(walk: Walk, call: Call, group: words.Group, state: State) -> None:
    """Note what else a call does that other ranks, the device or other code may notice."""
    node, guards = call.node, state.guards
    if side := words.point_to_point(call.name):
        walk.event("p2p", f"{side}\0{call.name}", node, guards, group=group)
    if _is_parallel(call):
        walk.event("module", call.name, node, guards, group="tp")
    for what in _waits_for_device(call):
        walk.event("sync", what, node, guards)
    if words.io(call.name):
        walk.event("io", call.name, node, guards)
    elif words.blocking(call.name):
        walk.event("block", call.name, node, guards)
    _note_writes(walk, call, state)
    if words.last(dotted(node.func)) in words.TAKES_NO_TUPLE:
        _note_tuples(walk, call, state)


def result(call: Call) -> Sym:
    """Return what a call gives of which nothing in particular is known."""
    name, tail, receiver = call.name, call.tail, call.receiver
    labels = labels_of_call(call)
    if words.varies(name):
        labels |= {"varies"}
    made = ""
    if tail[:1].isupper() and not name.endswith("()"):
        made = f"object:{tail}"
    elif name in ("range", "enumerate", "zip"):
        made = name
    tensor = (
        name.startswith("torch.") and not name.startswith(("torch.cuda", "torch.distributed"))
    ) or (receiver is not None and is_tensor(receiver) and tail not in words.NO_TENSOR_RESULT)
    if tail in words.NO_TENSOR or tail in ("cpu", "numpy", "item", "tolist"):
        tensor = False
    pure = not call.args and not call.keywords
    key = f"{name}()" if pure and "." not in name else f"{name}() at {at(call.node)}"
    if pure and isinstance(receiver, Sym):
        key = f"{receiver.key}.{tail}()"
    present = bool(made) or tensor
    return Sym(key, f"{name}()", labels, tensor=tensor, made=made, present=present)


def labels_of_call(call: Call) -> Labels:
    """Return what the result of a call depends on, by what it is given."""
    return frozenset().union(*map(labels_of, call.given), labels_of(call.func)) - {"tensor"}


def _is_parallel(call: Call) -> bool:
    """Tell whether a call runs a layer that talks to the other ranks inside."""
    func = call.func
    made = func.made.removeprefix("object:") if isinstance(func, Sym) else ""
    if made and words.is_parallel_layer(made):
        return True
    tail = call.tail.removesuffix("[]")
    if tail in words.PARALLEL_FUNCTIONS:
        return True
    if isinstance(call.node.func, ast.Attribute) and "communicator" in call.name.lower():
        return call.tail.startswith(("prepare", "postprocess"))
    return isinstance(func, Sym) and tail in words.PARALLEL_ATTRIBUTES


def _waits_for_device(call: Call) -> Iterator[str]:
    """Yield what in a call waits for the device."""
    name, tail, args, keywords = call.name, call.tail, call.args, call.keywords
    receiver = call.receiver
    if receiver is not None and not _is_on_cpu(receiver):
        tensor = is_tensor(receiver)
        named = isinstance(receiver, Sym) and not receiver.made
        if words.sync_method(tail) and (tensor or (named and tail != "unique")):
            yield f".{tail}()"
        elif tail == "to" and (tensor or named) and _says_cpu(call.given):
            yield '.to("cpu")'
    if words.sync_function(name) and (
        "synchronize" in tail or any(is_tensor(one) or isinstance(one, Seq) for one in args)
    ):
        yield name
    # The size of what these two give is only known on the device.
    if name == "torch.where" and len(args) + len(keywords) == 1:
        yield name
    if tail == "repeat_interleave" and "output_size" not in keywords:
        counts = [*args[name.startswith("torch.") :], *keywords.values()]
        if any(map(is_tensor, counts)):
            yield name
    if (
        name in ("torch.tensor", "torch.as_tensor", "torch.from_numpy")
        and ("device" in keywords and not _says_cpu([keywords["device"]]))
        and not (args and is_tensor(args[0]))
    ):
        yield f"{name} on a device"


def _is_on_cpu(value: Value) -> bool:
    return "cpu" in name_of(value).lower() or "cpu" in text_of(value).lower()


def _says_cpu(values: Iterable[Value]) -> bool:
    return any(
        (isinstance(one, Const) and one.value == "cpu") or "cpu" in text_of(one).lower().split("'")
        for one in values
    )


def _note_writes(walk: Walk, call: Call, state: State) -> None:
    """Note the tensors that a call writes into."""
    node, tail = call.node, call.tail
    in_place = tail.endswith("_")
    tensor = call.receiver is not None and is_tensor(call.receiver)
    if in_place and not tail.startswith("_") and tensor and tail != "requires_grad_":
        owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        walk.event("inplace", ast.unparse(owner), node, state.guards, value=call.receiver)
    into = [one.value for one in node.keywords if one.arg == "out"]
    function = call.name.startswith("torch.") and "()" not in call.name
    if (in_place and function) or call.keywords.get("inplace") == Const(True):
        into += node.args[:1]
    for written in into:
        for one in written.elts if isinstance(written, ast.List | ast.Tuple) else [written]:
            value = evaluate_again(walk, one, state)
            if is_tensor(value):
                walk.event("inplace", ast.unparse(one), node, state.guards, value=value)


def _note_tuples(walk: Walk, call: Call, state: State) -> None:
    """Note a tuple, or None, that is given to what takes a tensor."""
    no_none = words.last(dotted(call.node.func)) == "logits_processor"
    named = [(str(number), value) for number, value in enumerate(call.args)]
    for place, value in [*named, *call.keywords.items()]:
        for option, guards in options(walk, value, state):
            if isinstance(option, Seq) and option.kind == "tuple" and option.low > 0:
                walk.event("tuple", f"{place} a tuple {call.name}", call.node, guards)
            elif option == NONE and no_none and place in ("1", "hidden_states"):
                walk.event("tuple", f"{place} None {call.name}", call.node, guards)
