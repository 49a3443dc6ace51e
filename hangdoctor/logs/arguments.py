"""The arguments that a launch prints, taken apart without evaluating anything."""

from __future__ import annotations

import re

_CALL = re.compile(r"\b(?P<name>\w*[Aa]rgs)\s*=\s*(?:\w+\(|\{)|\b(?P<call>\w*Args)\(")
_KEY = re.compile(r"\s*(?:(?P<name>\w+)\s*=|['\"](?P<quoted>[^'\"]+)['\"]\s*:)\s*")
_CLOSES = {")": "(", "]": "[", "}": "{"}


def arguments(text: str) -> dict[str, str]:
    """Return the arguments in a line by name, their values as they are written.

    >>> arguments("server_args=ServerArgs(model_path='/m', tp_size=8, bs=[1, 2], port=None)")
    {'model_path': "'/m'", 'tp_size': '8', 'bs': '[1, 2]', 'port': 'None'}
    >>> arguments("server_args={'model_path': '/m', 'text': 'a, b', 'more': {'x': (1, 2)}} end")
    {'model_path': "'/m'", 'text': "'a, b'", 'more': "{'x': (1, 2)}"}
    >>> arguments("nothing")
    {}
    """
    call = _CALL.search(text)
    found: dict[str, str] = {}
    if call is None:
        return found
    for part in _parts(text, call.end()):
        key = _KEY.match(part)
        if key:
            found[key["name"] or key["quoted"]] = part[key.end() :].strip()
    return found


def _parts(text: str, begin: int) -> list[str]:
    """Return what stands between commas up to the closing bracket; quotes and brackets hold."""
    parts, opened, at = [], [], begin
    quote = ""
    while at < len(text):
        character = text[at]
        if quote:
            if character == "\\":
                at += 1
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            opened.append(character)
        elif character in ")]}":
            if not opened or opened.pop() != _CLOSES[character]:
                break
        elif character == "," and not opened:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
    parts.append(text[begin:at])
    return parts
