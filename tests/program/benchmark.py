"""How long lowering, checking, printing and parsing take.

python -m tests.program.benchmark
"""

import time
from collections.abc import Callable
from typing import TypeVar

from hexijax.plan.plan import Schedule
from hexijax.program.check import check
from hexijax.program.lower import StepRules, lower
from hexijax.program.text import parse, render
from tests.program.examples import make_chain, make_plan, make_stages

Result = TypeVar("Result")


def timed(what: str, work: Callable[[], Result]) -> Result:
    """The result of ``work``, and a line with its CPU time."""
    start_s = time.process_time()
    result = work()
    print(f"  {what:8} {time.process_time() - start_s:6.2f} s")
    return result


def main() -> None:
    """One pipeline of 8 stages with 4 segments each, few and many microbatches."""
    chain = make_chain(64)
    stages = make_stages([8] * 8, segments=[[2] * 4] * 8)
    for schedule in Schedule:
        for microbatches in (32, 128):
            plan = make_plan((stages, microbatches), schedule=schedule)
            print(f"{schedule}, {microbatches} microbatches:")
            program = timed(
                "lower",
                lambda p=plan: lower(p, chain, rules=StepRules(), checked=False),
            )
            print(f"  {len(program.body)} instructions")
            timed("check", lambda p=plan, x=program: check(x, p, chain))
            text = timed("render", lambda x=program: render(x))
            timed("parse", lambda t=text: parse(t))


if __name__ == "__main__":
    main()
