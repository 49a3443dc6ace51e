"""Stand-ins for packages that SGLang imports but a server on the CPU never calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class Refusing:
    """Any attribute of it exists; a call of it is an error that says what was called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name.rpartition(".")[2]
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self._name} was called, but is only a stand-in here")


class _Module(types.ModuleType):
    def __init__(self, name: str, attribute: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._attribute = attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._attribute(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, attribute: Any) -> None:
        self._prefix = package + "."
        self._attribute = attribute

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> Any:
        if fullname.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name, self._attribute)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def fill(package: str, attribute: Any = Refusing) -> Any:
    """Answer every submodule of a package, and return its `__getattr__`."""
    sys.meta_path.append(_Finder(package, attribute))
    return _Module(package, attribute).__getattr__
