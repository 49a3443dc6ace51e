"""The text of a rule or of a known issue, and the list of all."""

from __future__ import annotations

import difflib
import inspect

from hangdoctor import known_issues
from hangdoctor.errors import UsageError
from hangdoctor.rules import RULES, rule_id


def explain(rule: str | None) -> str:
    """Return the text of a rule, or of a known issue; without one, a line for each there is.

    Raises:
        UsageError: there is neither.
    """
    if rule is None:
        lines = summaries()
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:<{width}}{line}" for name, line in lines.items())
    name = rule.strip("[]").casefold().replace("_", "-")
    if issue := known_issues.find(name):
        return known_issues.describe(issue)
    texts = {rule_id(each): inspect.getdoc(each) or "" for each in RULES}
    if name not in texts:
        names = list(summaries())
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        near = near or [each for each in names if name and name in each][:3]
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(
            f"there is neither a rule nor a known issue {rule!r}{meant}",
            hint=f"hangdoctor explain {near[0]}" if near else "all there are: hangdoctor explain",
        )
    return f"{name}\n\n{texts[name]}"


def summaries() -> dict[str, str]:
    """Return one line about each rule and each known issue, by its id."""
    rules = {rule_id(each): (inspect.getdoc(each) or "").split("\n", 1)[0] for each in RULES}
    issues = {each: known_issues.find(each) for each in known_issues.ids()}
    return rules | {name: issue.title for name, issue in issues.items() if issue}
