"""How people say what a plan is chosen by: seconds, dollars or joules.

Judged -> what a token costs, in words, in a column, beside another plan's
"""

from typing import assert_never

from hexijax.planner import Objective
from hexijax.report.judged import Judged

MILLION = 1e6


def dollars(usd_per_token: float) -> str:
    """Of a million tokens, ``$0.412``."""
    return f"${usd_per_token * MILLION:.3g}"


def joules(joules_per_token: float) -> str:
    """Of a token, ``0.85 J``."""
    return f"{joules_per_token:.3g} J"


def over(objective: Objective) -> str:
    """Between a ratio of rates and whose rate it is a ratio to: ``1.4x over ...``."""
    match objective:
        case Objective.STEP:
            return "over"
        case Objective.PRICE:
            return "the tokens a dollar of"
        case Objective.ENERGY:
            return "the tokens a joule of"
        case _:
            assert_never(objective)


def more(objective: Objective) -> str:
    """Behind a percentage that something costs: ``it costs 44% more a token``."""
    match objective:
        case Objective.STEP:
            return ""
        case Objective.PRICE:
            return " more a token"
        case Objective.ENERGY:
            return " more energy a token"
        case _:
            assert_never(objective)


def than_found(objective: Objective, ratio: float) -> str:
    """Of a plan that was given, beside the one a search finds."""
    match objective:
        case Objective.STEP:
            return f"takes {ratio:.2f}x the step"
        case Objective.PRICE:
            return f"costs {ratio:.2f}x a token"
        case Objective.ENERGY:
            return f"takes {ratio:.2f}x the energy a token"
        case _:
            assert_never(objective)


def beside(objective: Objective, worse: float) -> str:
    """What a part of a sentence adds to how much longer a step is."""
    match objective:
        case Objective.STEP:
            return ""
        case Objective.PRICE:
            return f", a token costs {worse:+.1%}"
        case Objective.ENERGY:
            return f", a token takes {worse:+.1%} energy"
        case _:
            assert_never(objective)


def ahead(objective: Objective, name: str, ratio: float, other: str) -> str:
    """Which of two plans is the better, and by how much."""
    match objective:
        case Objective.STEP:
            return f"{name} is {ratio:.2f}x faster than {other}"
        case Objective.PRICE | Objective.ENERGY:
            return f"{name} gives {ratio:.2f}x {over(objective)} {other}"
        case _:
            assert_never(objective)


def alike(objective: Objective, name: str, other: str, within: float) -> str:
    """That neither of two plans is the better."""
    match objective:
        case Objective.STEP:
            return f"{name} is as fast as {other} (within {within:.1%})"
        case Objective.PRICE | Objective.ENERGY:
            return f"{name} gives {over(objective)} {other} (within {within:.1%})"
        case _:
            assert_never(objective)


def heading(objective: Objective) -> tuple[str, ...]:
    """Of the column that tables gain; none where the step's own says it."""
    match objective:
        case Objective.STEP:
            return ()
        case Objective.PRICE:
            return ("USD/Mtoken",)
        case Objective.ENERGY:
            return ("J/token",)
        case _:
            assert_never(objective)


def cell(judged: Judged) -> tuple[str, ...]:
    """What stands under ``heading``."""
    per_token = judged.problem.tokens(judged.cost)
    match judged.problem.objective:
        case Objective.STEP:
            return ()
        case Objective.PRICE:
            return (f"{per_token * MILLION:.3g}",)
        case Objective.ENERGY:
            return (f"{per_token:.3g}",)
        case _:
            assert_never(judged.problem.objective)


def rate_heading(objective: Objective) -> str:
    """Of ``Judged.tokens_per_cost``."""
    match objective:
        case Objective.STEP:
            return "tokens/s"
        case Objective.PRICE:
            return "tokens/USD"
        case Objective.ENERGY:
            return "tokens/J"
        case _:
            assert_never(objective)


def costs(judged: Judged) -> str:
    """What a token costs, and under a plan's objective how near that is to the bound.

    Empty where neither counts nor is known.
    """
    usd, power = judged.usd_per_token, judged.joules_per_token
    least = judged.problem.tokens(judged.least_cost)
    of_bound = f", {judged.fraction_of_bound:.1%} of the bound"
    match judged.problem.objective:
        case Objective.STEP:
            return "" if usd is None else f"{dollars(usd)} a million tokens"
        case Objective.PRICE:
            assert usd is not None
            return f"{dollars(usd)} a million tokens{of_bound} ({dollars(least)})"
        case Objective.ENERGY:
            assert power is not None
            return f"{joules(power)} a token{of_bound} ({joules(least)})"
        case _:
            assert_never(judged.problem.objective)
