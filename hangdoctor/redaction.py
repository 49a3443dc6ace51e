"""Keeps secrets out of what is written and printed: it ends up in bug reports."""

from __future__ import annotations

import re

_SECRETS = re.compile(
    rb"(?i)("
    # A name begins once and is bounded: else one is sought from each dash of a line of dashes.
    rb"(?:(?<!-)--[a-z-]{0,64}(?:api-key|token|password|secret)(?:=|\s+|\",\")"
    rb"|\b(?:hf_token|[a-z0-9_]{0,64}(?:api_key|access_key|secret_key|access_key_id|session_token)"
    rb"|password|secret|auth_token)['\"]?\s*[=:]\s*)['\"]?"
    rb"|\bbearer\s+(?=[\w.~+/=-]{8}))"
    rb"(?!None\b)([^\s'\",)\\]+)"
    rb"|\bhf_[A-Za-z0-9]{20,}"
)


def redact(data: bytes) -> bytes:
    """Replace what looks like a secret by as many asterisks, so that no offset moves.

    >>> redact(b"--api-key sk-123456 --port 30000, api_key=None, hf_token='abc'")
    b"--api-key ********* --port 30000, api_key=None, hf_token='***'"
    """
    return _SECRETS.sub(lambda match: (match[1] or b"") + b"*" * len(match[2] or match[0]), data)


def redact_text(text: str) -> str:
    """Do the same with text.

    >>> redact_text('["--api-key","sk-1"]')
    '["--api-key","****"]'
    """
    return redact(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
