"""What the islands' benchmark runs and shows."""

import pytest

from experiments.islanded import settings, table
from hexijax.costs.memory import plan_memory
from hexijax.job.intake import trace_chain, training_facts
from hexijax.layers.chain import Chain
from hexijax.plan.checks import check
from hexijax.planner import PlanOptions
from hexijax.planner.mesh import compute_dtype
from hexijax.simulator import predict

TIMES = {"step_s": 1.0, "least_s": 0.9, "most_s": 1.1}


@pytest.fixture(scope="module")
def setting():
    return settings.large()


@pytest.fixture(scope="module")
def chain(setting: settings.Setting):
    return trace_chain(setting.experiment)


@pytest.mark.parametrize("slow", [False, True])
def test_the_pipeline_is_one_plan_of_two_islands_that_fits(
    slow: bool, setting: settings.Setting, chain: Chain
):
    plan = settings.pipeline(setting, chain, slow=slow)
    cluster = settings.cluster("h100-80g-sxm", slow=slow)
    check(plan, chain, cluster)
    assert tuple(cluster.islands) == ("one", "two")
    for name, parts in plan_memory(plan, chain, cluster).items():
        device = cluster.device(name)
        assert parts.total_bytes < device.usable_memory_bytes
        assert compute_dtype("bfloat16", device) == "bfloat16"


def test_both_stages_take_as_long_beside_a_slow_card_too(
    setting: settings.Setting, chain: Chain
):
    for slow in (False, True):
        plan = settings.pipeline(setting, chain, slow=slow)
        cluster = settings.cluster("h200-141g-sxm", slow=slow)
        options = PlanOptions.of(training_facts(setting.experiment))
        found = predict(plan, chain, cluster, rules=options.rules(plan))
        first, second = (found.utilisation(d) for d in ("one/0", "two/0"))
        assert 0.85 < first / second < 1 / 0.85


def test_figures_follow_from_what_was_measured():
    found = {
        "failed": {"paths inside": "no time left"},
        "mixed": {
            "one": {
                "worst_error_over_limit": 0.5,
                "worst_loss_error": 1e-5,
                "losses": [6.0, 1.0],
            }
        },
        "pipeline": {
            "one process": {**TIMES, "tokens_per_s": 100.0},
            "islands": {"one": {**TIMES, "tokens_per_s": 95.0}},
        },
        "slow": {
            "held": 66,
            "one process": {**TIMES, "tokens_per_s": 80.0},
            "islands": {"one": {**TIMES, "tokens_per_s": 72.0}},
            "before": {"product_flops_per_s": [700e12, 390e12]},
        },
        "limited": {"0.125": {"step_s": 5.0, "predicted_s": 4.5}},
        "paths": {"inside": [{"path": "all-reduce", "bytes": 2**20, "s": 1e-3}]},
    }
    reached = {f.name.split(":")[0]: f.measured for f in table.figures(found)}
    assert reached == {
        "islands of a card and the CPU": 0.5,
        "islands of a card each": 0.95,
        "islands of a card each, 1 ": 0.9,
        "islands, 0.125 GB/s apart": 1 - 4.5 / 5.0,
    }
    shown = "\n".join(table.section(found))
    for line in (
        "| 0.500 | 1.0e-05 | 6.000 to 1.000 |",
        "| islands | 95 | 1.000 s | 0.900 s | 1.100 s |",
        "| islands | 72 | 1.000 s | 0.900 s | 1.100 s |",
        "| products before | 700 TFLOP/s | 390 TFLOP/s |",
        "| 0.125 | 5.000 s | 4.500 s | 0.900 |",
        "| all-reduce | 1.05 |",
        "failed: paths inside.",
    ):
        assert line in shown
    assert list(table.figures({})) == []
