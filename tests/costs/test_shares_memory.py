"""What freed parameters and borders that wait on the host leave on a device."""

from hexijax.costs.memory import plan_memory
from hexijax.plan.plan import Schedule
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_simulator import cluster


def test_borders_that_wait_on_the_host_are_no_part_of_the_peak():
    chain, machines = make_chain(4), cluster(("a", 1))
    parts = [
        plan_memory(
            make_plan(
                (make_stages([4], segments=[[1] * 4], waits=True), microbatches),
                schedule=Schedule.LAYERED,
            ),
            chain,
            machines,
        )["a/0"]
        for microbatches in (4, 32)
    ]
    border = chain.layers[0].border_bytes
    assert [p.host_bytes for p in parts] == [4 * 3 * border, 32 * 3 * border]
    assert parts[0].largest != "host"
    grown = parts[1].total_bytes - parts[0].total_bytes
    assert grown == parts[1].activations_bytes - parts[0].activations_bytes


def test_freed_parameters_count_as_two_passes():
    chain, machines = make_chain(4), cluster(("a", 1), ("store", 1))
    kept, freed = (
        plan_memory(
            make_plan(
                (make_stages([4], segments=[[1] * 4], freed=freed), 2),
                schedule=Schedule.LAYERED,
            ),
            chain,
            machines,
        )["a/0"]
        for freed in (False, True)
    )
    assert (freed.params_bytes, kept.passes_bytes) == (0, 0)
    assert freed.passes_bytes == kept.params_bytes / 2
