"""Import-only: SGLang's kernels exist for GPUs and, in builds of their own, for some CPUs."""

from _inert import fill

__version__ = "0.3.21"
__path__ = []
__getattr__ = fill(__name__)
