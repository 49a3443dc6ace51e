"""Import-only: image models are not tested."""

from _inert import Refusing

from . import transforms

__all__ = ["transforms"]
__version__ = "0.0.0+stub"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Refusing(f"torchvision.{name}")
