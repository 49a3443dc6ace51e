"""Compares the behaviour of a patched model file with stock: by reading, running, launching."""
