"""A pretend SGLang: its processes, its log and the shape of its call tree, and nothing behind it.

The ranks are real processes that wait for each other on real sockets. Files and functions are
called as those of SGLang 0.5.9 whose part they play; nothing of its code is here.
"""
