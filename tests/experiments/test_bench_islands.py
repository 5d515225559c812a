"""What the islands' benchmark runs and shows."""

from experiments.islanded import settings, table
from hexijax.costs.memory import plan_memory
from hexijax.job.intake import trace_chain
from hexijax.plan.checks import check
from hexijax.planner.mesh import compute_dtype

TIMES = {"step_s": 1.0, "least_s": 0.9, "most_s": 1.1}


def test_the_pipeline_is_one_plan_of_two_islands_that_fits():
    setting = settings.large()
    chain = trace_chain(setting.experiment)
    plan = settings.pipeline(setting, chain)
    cluster = settings.cluster("h100-80g-sxm")
    check(plan, chain, cluster)
    assert tuple(cluster.islands) == ("one", "two")
    for name, parts in plan_memory(plan, chain, cluster).items():
        device = cluster.device(name)
        assert parts.total_bytes < device.usable_memory_bytes
        assert compute_dtype("bfloat16", device) == "bfloat16"


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
        "limited": {"0.125": {"step_s": 5.0, "predicted_s": 4.5}},
        "paths": {"inside": [{"path": "all-reduce", "bytes": 2**20, "s": 1e-3}]},
    }
    reached = {f.name.split(":")[0]: f.measured for f in table.figures(found)}
    assert reached == {
        "islands of a card and the CPU": 0.5,
        "islands of a card each": 0.95,
        "islands, 0.125 GB/s apart": 1 - 4.5 / 5.0,
    }
    shown = "\n".join(table.section(found))
    for line in (
        "| 0.500 | 1.0e-05 | 6.000 to 1.000 |",
        "| islands | 95 | 1.000 s | 0.900 s | 1.100 s |",
        "| 0.125 | 5.000 s | 4.500 s | 0.900 |",
        "| all-reduce | 1.05 |",
        "failed: paths inside.",
    ):
        assert line in shown
    assert list(table.figures({})) == []
