from _inert import Refusing

from .functional import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Refusing(f"torchvision.transforms.{name}")
