"""The release that is played; the part after "+" says that it is not the real one."""

__version__ = "0.5.9+demo"
