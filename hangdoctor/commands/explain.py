"""The text of a rule or of a known issue."""

from __future__ import annotations

import inspect

from hangdoctor import known_issues
from hangdoctor.errors import UsageError
from hangdoctor.rules import RULES, rule_id


def explain(rule: str) -> str:
    """Return the text of a rule, or of a known issue.

    Raises:
        UsageError: there is neither.
    """
    if issue := known_issues.find(rule):
        return known_issues.describe(issue)
    rules = {rule_id(each): each for each in RULES}
    if rule not in rules:
        raise UsageError(
            f"there is neither a rule nor a known issue {rule!r}",
            hint=f"rules: {', '.join(sorted(rules))}; "
            f"known issues: {', '.join(known_issues.ids())}",
        )
    return f"{rule}\n\n{inspect.getdoc(rules[rule])}"
