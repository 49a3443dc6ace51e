"""Says where an LLM inference server's start-up stalls, who is to blame, and what to do next."""

__version__ = "0.1.0"
