"""Runs a series of contests: progress to stderr, the report to stdout.

    python -m hexijax.planner.contest --seed 0 --clusters 100 --json scores.json

Exits with 1 where the goal is missed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hexijax.planner.contest.draw import draw
from hexijax.planner.contest.score import Score, Verdict, match


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the contests asked for; 0 if the goal is met."""
    parser = argparse.ArgumentParser(
        prog="python -m hexijax.planner.contest",
        description="Our planner against every baseline on random clusters.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the series")
    parser.add_argument("--clusters", type=int, default=100, help="contests that count")
    parser.add_argument("--only", type=int, help="one contest, by its number")
    parser.add_argument("--most-devices", type=int, default=512, help="of a cluster")
    parser.add_argument("--json", type=Path, help="writes every score to a file")
    args = parser.parse_args(argv)
    scores: list[Score] = []
    numbers = [args.only] if args.only is not None else range(2 * args.clusters)
    for number in numbers:
        contest = draw(args.seed, number, most_devices=args.most_devices)
        score = match(contest)
        if score.is_void:
            print(f"{number:4} void: {contest} fits nobody", file=sys.stderr)
            continue
        scores.append(score)
        print(_line(score), file=sys.stderr, flush=True)
        if len(scores) == args.clusters:
            break
    if not scores:
        print("no contest had a plan", file=sys.stderr)
        return 1
    verdict = Verdict(scores=tuple(scores))
    if args.json:
        args.json.write_text(json.dumps([s.to_json() for s in scores], indent=1))
    print("\n".join(verdict.lines()))
    return 0 if verdict.is_good else 1


def _line(score: Score) -> str:
    return (
        f"{score.contest.number:4} {score.ratio:7.3f}  ours {score.step_s:8.3f} s, "
        f"{score.bound_s / score.step_s:4.0%} of bound, in {score.search_s:5.1f} s; "
        f"{score.best} {score.best_s:8.3f} s | {score.contest}"
    )


if __name__ == "__main__":
    sys.exit(main())
