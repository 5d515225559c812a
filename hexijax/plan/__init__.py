"""The Plan: what is where, as data. No JAX, no devices, no search."""

from hexijax.plan.plan import Plan, PlanError, Replica, Stage, StateShare

__all__ = ["Plan", "PlanError", "Replica", "Stage", "StateShare"]
