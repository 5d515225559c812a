"""Pass 8: proves that a Program does what its plan says, before anything runs.

    Program, Plan, Chain -> check -> Report, or a ProgramError with the fault marked

One file a rule in ``rules/``. The Program may come from ``lower``, from a file, or from
a person's editor.
"""

import dataclasses
from collections.abc import Mapping

from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan
from hexijax.program.program import Program
from hexijax.program.rules.facts import Facts
from hexijax.program.rules.fault import Faults
from hexijax.program.rules.lifetimes import check_lifetimes
from hexijax.program.rules.runs import check_layers, check_loads, check_runs
from hexijax.program.rules.signatures import check_signatures
from hexijax.program.rules.streams import check_streams, place_streams
from hexijax.program.rules.sync import check_sync
from hexijax.program.rules.wires import check_wires


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a Program that holds was seen to need."""

    live_microbatches: Mapping[Place, int]
    """Most microbatches whose residuals a stage holds at once."""

    live_handed: Mapping[Place, int]
    """Most microbatches between the parts of a split backward, by stage."""

    live_activations: Mapping[Place, int]
    """Most microbatches of which a stage holds any border activation at once."""

    live_slots: Mapping[str, int]
    """Most slots in use at once, by pool."""

    live_passes: Mapping[Place, int]
    """Most passes whose freed parameters a stage holds at once, on their way or there.
    """

    live_grads: Mapping[Place, int]
    """Most passes whose gradients a stage holds at once, where its plan says how many.
    """


def check(
    program: Program, plan: Plan, chain: Chain, *, whole_leaves: bool = False
) -> Report:
    """Applies every rule.

    Raises:
      ProgramError: naming the rule, with the Program around the fault.
    """
    faults = Faults(program)
    check_layers(plan, chain, faults)
    facts = Facts.of(program, plan, chain, whole_leaves=whole_leaves)
    check_runs(program, facts, faults)
    check_loads(program, facts, faults)
    check_wires(program, faults)
    check_signatures(program, facts, faults)
    check_sync(program, facts, faults)
    check_streams(place_streams(program), faults)
    peaks = check_lifetimes(program, facts, faults)
    return Report(
        live_microbatches=dict(peaks.residuals),
        live_handed=dict(peaks.handed),
        live_activations=dict(peaks.activations),
        live_slots=dict(peaks.slots),
        live_passes=dict(peaks.passes),
        live_grads=dict(peaks.grads),
    )
