"""The search for a plan: which devices, which layers, how many microbatches.

    Chain + Cluster + batch size -> make_plan -> Plan

One file a decision: ``grouping``, ``layers``, ``batches``, ``segments``, ``spans``
(remat); ``estimate`` judges, ``search`` ties them together. No JAX and no device here.
"""

from hexijax.planner.infeasible import InfeasiblePlanError
from hexijax.planner.objective import Objective
from hexijax.planner.options import Grouping, PlanOptions
from hexijax.planner.search import make_plan
from hexijax.planner.single import single_plan

__all__ = [
    "Grouping",
    "InfeasiblePlanError",
    "Objective",
    "PlanOptions",
    "make_plan",
    "single_plan",
]
