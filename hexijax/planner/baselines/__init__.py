"""What others would choose, in our Plan language, under our costs.

    Chain + Cluster -> baseline -> its best Plan, for each of ``all_baselines()``

One file a system, written from what its paper says and tuned fairly: everything the
system can choose is swept, every plan is held to the judge the planner is held to, and
each may leave cards out. They share no search with the planner, only its exact helpers
(``layers``, ``batches``, ``pace``), so that beating them means something.

Costs, fits and the judge's answers are common ground: each is found once for all nine.
"""

from collections.abc import Mapping

from hexijax.planner.baselines.autohet import autohet_style
from hexijax.planner.baselines.baseline import Baseline
from hexijax.planner.baselines.cephalo import cephalo_style
from hexijax.planner.baselines.fsdp import fsdp_style
from hexijax.planner.baselines.hexiscale import hexiscale_style
from hexijax.planner.baselines.megatron import megatron_style
from hexijax.planner.baselines.metis import metis_style
from hexijax.planner.baselines.one_kind import one_kind
from hexijax.planner.baselines.sailor import sailor_style
from hexijax.planner.baselines.whale import whale_style

__all__ = ["Baseline", "all_baselines"]


def all_baselines() -> Mapping[str, Baseline]:
    """Every baseline by the name under which tables print it."""
    return {
        "one-kind": one_kind,
        "megatron-style": megatron_style,
        "fsdp-style": fsdp_style,
        "whale-style": whale_style,
        "metis-style": metis_style,
        "sailor-style": sailor_style,
        "cephalo-style": cephalo_style,
        "hexiscale-style": hexiscale_style,
        "autohet-style": autohet_style,
    }
