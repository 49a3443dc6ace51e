"""Import-only: no Triton kernel can run on the CPU, and the real wheel takes a gigabyte.

Decorators hand functions through, types and constants are inert, a launch of a kernel is an error.
"""

import functools
import importlib
import types

from _inert import Refusing, fill

__version__ = "3.5.1"
__path__ = []


class Kernel:
    """A function under @triton.jit: callable as it is, not launchable."""

    def __init__(self, function):
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        return Refusing(f"triton kernel {self.__name__}")


class Inert(Refusing):
    """A name of triton.language: subscripted, joined by `|`, inherited from, used as decorator."""

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return Kernel(args[0])
        return Inert(f"{self._name}()")

    def __getitem__(self, key):
        return Inert(f"{self._name}[]")

    __iter__ = None  # or Python iterates by subscripts, without end

    def __instancecheck__(self, instance):
        return False  # nothing is one of triton's dtypes

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (object,)

    def __hash__(self):
        return hash(self._name)

    def __eq__(self, other):
        return isinstance(other, Inert) and other._name == self._name


class Config:
    def __init__(self, kwargs=None, *_, **__):
        self.kwargs = kwargs or {}


class _Driver:
    @property
    def active(self):  # what the real one says on a machine without a GPU
        raise RuntimeError("0 active drivers ([]). There should only be one.")


def jit(function=None, **_):
    return Kernel if function is None else Kernel(function)


def autotune(*_, **__):
    return lambda function: function


heuristics = autotune


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << (int(n) - 1).bit_length() if n > 0 else 0


@functools.cache
def _attribute(qualified_name):
    """Return a class for a name that torch joins into unions and tests instances against."""
    name = qualified_name.rpartition(".")[2]
    if name[0].isupper() and not qualified_name.startswith("triton.language"):
        base = Exception if name.endswith(("Error", "OutOfResources")) else object
        return type(name, (base,), {})
    return Inert(qualified_name)


__getattr__ = fill(__name__, _attribute)
# The finder that fill() installed answers these imports.
runtime = importlib.import_module("triton.runtime")
runtime.driver = _Driver()
importlib.import_module("triton.backends").backends = {}  # none for the CPU
