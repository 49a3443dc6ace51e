"""The text of a rule."""

from __future__ import annotations

import inspect

from hangdoctor.errors import UsageError
from hangdoctor.rules import RULES, rule_id


def explain(rule: str) -> str:
    """Return the text of a rule.

    Raises:
        UsageError: there is no such rule.
    """
    rules = {rule_id(each): each for each in RULES}
    if rule not in rules:
        raise UsageError(f"there is no rule {rule!r}", hint=f"rules: {', '.join(sorted(rules))}")
    return f"{rule}\n\n{inspect.getdoc(rules[rule])}"
