"""`hexijax plan`: search, explain, save the plan. No device is used."""

import argparse

from hexijax.cli.session import SINGLE, find_plan, open_session, trace_chain
from hexijax.errors import UserError
from hexijax.plan import Plan, serial, text
from hexijax.planner import explain
from hexijax.report.folder import write_atomically, write_json
from hexijax.report.summary import Report


def plan(arguments: argparse.Namespace) -> int:
    """Makes a plan, or explains the one given; returns the exit code."""
    if arguments.plan == SINGLE:
        raise UserError("--plan single is the plain program on one device, no plan.")
    # Planning traces on shapes: a GPU would only be taken from whoever uses it.
    session = open_session(arguments, cpu=True)
    chain = trace_chain(session.experiment)
    made = find_plan(session, chain, arguments.plan, print)
    print(f"{text.render(made, chain)}\n{explain(made, chain, session.cluster)}")
    for note in chain.notes:
        print(f"note: {note}")
    folder = arguments.out / session.experiment.name
    write_atomically(folder / "plan.txt", text.render(made, chain))
    serial.save(folder / "plan.json", made, session.cluster, chain)
    if arguments.json:
        write_json(arguments.json, predicted(made))
    print(f"saved as {folder / 'plan.txt'}; run it with --plan {folder / 'plan.txt'}")
    return 0


def predicted(plan: Plan) -> Report:
    """``replicas`` as in a run's report, and the figures the plan was chosen for."""
    prediction = plan.prediction
    return {
        "replicas": serial.report_replicas(plan),
        "batch_size": plan.batch_size,
        "schedule": plan.schedule.value,
        "predicted_step_s": prediction.step_s if prediction else None,
        "predicted_memory_bytes_by_device": (
            dict(prediction.memory_bytes) if prediction else {}
        ),
    }
