"""What others would choose, in our Plan language, under our costs.

    Chain + Cluster -> baseline -> its best Plan, for each of ``all_baselines()``

One file a system, written from what its paper says and tuned fairly: everything the
system can choose is swept, every plan is held to the judge the planner is held to, and
each may leave cards out. They share no search with the planner, only its exact helpers
(``layers``, ``batches``), so that beating them means something.
"""

from collections.abc import Mapping

from hexijax.planner.baselines.baseline import Baseline
from hexijax.planner.baselines.fsdp import fsdp_style
from hexijax.planner.baselines.megatron import megatron_style

__all__ = ["Baseline", "all_baselines"]


def all_baselines() -> Mapping[str, Baseline]:
    """Every baseline by the name under which tables print it."""
    return {
        "megatron-style": megatron_style,
        "fsdp-style": fsdp_style,
    }
