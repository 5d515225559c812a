"""What must be the same on all islands before anything runs, and how to mend it.

island -> fact -> value: disagreement -> words, or nothing
"""

from collections.abc import Mapping


def disagreement(facts: Mapping[str, Mapping[str, str]]) -> str:
    """What islands disagree on, by island and fact; empty: nothing."""
    names = dict.fromkeys(fact for found in facts.values() for fact in found)
    for fact in names:
        by_value: dict[str, list[str]] = {}
        for island, found in facts.items():
            by_value.setdefault(found.get(fact, "none"), []).append(island)
        if len(by_value) > 1:
            sides = " and ".join(
                f"{value} on {', '.join(islands)}"
                for value, islands in by_value.items()
            )
            return (
                f"The islands' {fact} is not the same: {sides}. All islands run one "
                f"plan with one code on the same data; {_mend(fact)}"
            )
    return ""


def _mend(fact: str) -> str:
    match fact:
        case "plan":
            return "give each the plan file of this run."
        case "code":
            return "bring hexijax and the experiment's folder to one state everywhere."
        case "data":
            return "bring the data's files to one state everywhere."
        case _:
            return "start each with the same flags."
