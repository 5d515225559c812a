"""The Plan: what is where, as data. No JAX, no devices, no search.

``text`` prints and parses it, ``serial`` is its JSON, ``checks`` holds it against a
chain and a cluster.
"""

from hexijax.plan.plan import Plan, PlanError, Replica, Stage, StateShare

__all__ = ["Plan", "PlanError", "Replica", "Stage", "StateShare"]
