"""How many layers are compiled as one is found, not assumed."""

import pytest

from hexijax.planner import PlanOptions
from hexijax.planner.mesh import MeshMaker
from hexijax.planner.score import Scorer
from tests.plan.examples import make_chain, make_cluster, make_kind

KINDS = (make_kind("fast", tflops=10), make_kind("slow", tflops=2.5))
CHAIN = make_chain(12, width=512, rows=256, block_flops=2e10)


@pytest.mark.parametrize("gb_per_s", [0.05, 1, 200])
def test_whole_stages_and_short_segments_are_both_weighed(gb_per_s: float):
    """Sums hide beside short ones, and whole ones cost less where nothing need hide."""
    cluster = make_cluster([[("fast", 1)], [("slow", 1)]], KINDS, gb_per_s=gb_per_s)
    maker = MeshMaker(cluster, "float32")
    layout = tuple((maker.mesh((device.name,)),) for device in cluster.devices)

    def cost(length: int | None) -> float:
        options = PlanOptions(layers_per_segment=length)
        scored = Scorer(CHAIN, cluster, 64, options).score(layout)
        assert scored
        return scored.cost

    assert cost(None) == min(cost(4), cost(len(CHAIN.layers)))
