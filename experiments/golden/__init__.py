"""Figures that others published, beside ours: one table a system.

    python -m experiments.golden [hexiscale ...] [--json FILE]

    published case -> Problem -> our plan, the rows asked for -> Table: rows, checks

Others measured, we predict: figures of the two are never divided by each other. What is
held against a published ratio or gap is a ratio or gap of predictions, both sides under
the same costs. What a case leaves out (batch, links) is assumed, and the table says so.
"""
