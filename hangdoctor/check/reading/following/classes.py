"""Methods of the classes of these files, inherited ones too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.nodes import dotted, own_method
from hangdoctor.check.reading.values import Fn, Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hangdoctor.check.reading.values import Cls

_MOST_BASES = 20


def method(classes: Mapping[str, Cls], class_name: str, name: str, owner: Value) -> Fn | None:
    """Return a method bound to its owner; None where no class of these files defines it."""
    queue = [classes[class_name]] if class_name in classes else []
    seen = 0
    while queue and seen < _MOST_BASES:
        seen += 1
        cls = queue.pop(0)
        if (own := own_method(cls.node, name)) is not None:
            return Fn(own, cls.source, owner)
        for base in cls.node.bases:
            parent = classes.get(words.last(dotted(base)))
            if parent is not None:
                queue.append(parent)
    return None


def inherited(
    classes: Mapping[str, Cls], heap: Mapping[tuple[str, str], Value], class_name: str, name: str
) -> Value | None:
    """Return an attribute that is known of a class's bases."""
    cls = classes.get(class_name)
    for base in cls.node.bases if cls else ():
        parent = words.last(dotted(base))
        if parent in classes and parent != class_name:
            if (parent, name) in heap:
                return heap[(parent, name)]
            if (found := inherited(classes, heap, parent, name)) is not None:
                return found
    return None
