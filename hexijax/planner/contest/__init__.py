"""Our plan against everybody else's, on clusters and models drawn at random.

python -m hexijax.planner.contest --seed N [--clusters 100] [--json FILE]

seed, number -> draw -> match -> Score -> Verdict: deciles, and is the goal met
"""

from hexijax.planner.contest.draw import Contest, draw
from hexijax.planner.contest.score import Score, Verdict, match

__all__ = ["Contest", "Score", "Verdict", "draw", "match"]
