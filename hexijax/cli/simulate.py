"""`hexijax simulate`: a plan's step on a timeline. No device is used."""

import argparse

from hexijax.cli.session import (
    SINGLE,
    find_plan,
    open_session,
    plan_options,
    trace_chain,
)
from hexijax.costs import PlanCosts
from hexijax.errors import UserError
from hexijax.program.lower import StepRules, lower
from hexijax.report.folder import write_json
from hexijax.report.summary import Report
from hexijax.report.timeline import describe
from hexijax.simulator import Timeline, simulate
from hexijax.simulator.trace import write_trace


def run_simulation(arguments: argparse.Namespace) -> int:
    """Simulates the plan given, or the one made; returns the exit code."""
    if arguments.plan == SINGLE:
        raise UserError(
            "--plan single is the plain program on one device; a plan is simulated."
        )
    session = open_session(arguments, cpu=True)
    experiment = session.experiment
    chain = trace_chain(experiment)
    plan = find_plan(session, chain, arguments.plan, print)
    options = plan_options(experiment)
    costs = PlanCosts(
        plan,
        chain,
        session.cluster,
        options.moments,
        whole_leaves=options.whole_leaves,
    )
    rules = StepRules(
        clip=experiment.clip_norm is not None,
        skip_nonfinite=experiment.skip_nonfinite,
    )
    program = lower(
        plan, chain, rules=rules, costs=costs, whole_leaves=options.whole_leaves
    )
    timeline = simulate(program, plan, chain, session.cluster, costs=costs)
    print(describe(timeline))
    folder = arguments.out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(folder / "trace.json", timeline)
    if arguments.json:
        write_json(arguments.json, figures(timeline))
    print(f"saved as {folder / 'trace.json'}; open it at https://ui.perfetto.dev")
    return 0


def figures(timeline: Timeline) -> Report:
    """The timeline without its events."""
    return {
        "simulated_step_s": timeline.step_s,
        "busy_s": {d: dict(parts) for d, parts in timeline.busy_s.items()},
        "idle_s": {d: dict(parts) for d, parts in timeline.idle_s.items()},
        "link_bytes": dict(timeline.link_bytes),
        "host_s": dict(timeline.host_s),
    }
