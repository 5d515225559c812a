"""What fits where state goes to whoever has room, beside even state.

    cluster files, a family of GPTs by depth -> the deepest that fits, tokens/s -> page

Run:     python -m experiments.state_table > state.md
Needs:   nothing but time: some 40 plans, of 5 to 30 CPU seconds each
Expect:  a page; names of cluster files and ``--layers`` make a smaller one
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.layers.known import gpt
from hexijax.plan.plan import Plan
from hexijax.planner import InfeasiblePlanError, PlanOptions
from hexijax.planner.baselines import all_baselines
from hexijax.planner.options import Grouping
from hexijax.planner.search import search

CLUSTERS = ("cephalo", "a100_v100")
LENGTH = 512
BATCH_SIZE = 64
BATCH_SIZES = (16, 64, 256)
STEP = 4
"""Layers by which models are told apart."""

OURS, EVEN, FSDP = "ours", "even state", "FSDP-style"

System = Callable[[Chain, Cluster, int], Plan | None]
"""Its plan of a model, machines and a batch; None where nothing fits."""

HEAD = f"""\
# State where there is room

Written by `python -m experiments.state_table` from plans alone: figures
are predicted, on cards as their data sheets have them, and none of it has run there.

A GPT of width 2560 with 32 heads, as deep as the rows say, in bfloat16 where a card has
it, with Adam's moments and masters in fp32: 18 bytes a parameter with gradients before
anything is computed. Sequences have {LENGTH} tokens. Every mesh holds the whole model,
as in [Cephalo](https://arxiv.org/abs/2411.01075): pipelines, which the planner weighs
as well, would need less of every card.

- *{OURS}*: state goes to whoever has room; parameters are kept, or gathered for each
  pass; batches follow speed.
- *{EVEN}*: the same search, but the devices that compute with a parameter hold equal
  parts of its state (`even_state`).
- *{FSDP}*: the whole model on every card it uses, state sharded evenly, equal
  batches, with microbatch and remat as they are best.

All three may leave cards out. No row of another is above ours: the search begins with
plans of even state, and ends no worse."""


def ours(chain: Chain, cluster: Cluster, batch_size: int, *, even: bool) -> Plan | None:
    """What the planner finds among plans whose meshes hold the whole model."""
    options = PlanOptions(grouping=Grouping.MESH, even_state=even)
    try:
        return search(
            chain, cluster, batch_size=batch_size, dtype="bfloat16", options=options
        ).plan
    except InfeasiblePlanError:
        return None


def fsdp(chain: Chain, cluster: Cluster, batch_size: int) -> Plan | None:
    """The baseline's best."""
    return all_baselines()["fsdp-style"](
        chain, cluster, batch_size=batch_size, dtype="bfloat16", options=PlanOptions()
    )


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        OURS: functools.partial(ours, even=False),
        EVEN: functools.partial(ours, even=True),
        FSDP: fsdp,
    }
)


@functools.cache
def model(layers: int) -> Chain:
    """Of the family."""
    return gpt(depth=layers, width=2560, num_heads=32, length=LENGTH)


class Plans:
    """Of one cluster; each is made once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._made: dict[tuple[str, int, int], Plan | None] = {}

    def plan(self, system: str, layers: int, batch_size: int) -> Plan | None:
        """None where nothing fits."""
        key = system, layers, batch_size
        if key not in self._made:
            plan = SYSTEMS[system](model(layers), self.cluster, batch_size)
            self._made[key] = plan
            said = f"{tokens_per_s(plan):,.0f} tokens/s" if plan else "does not fit"
            where = f"{self.cluster.name}, {layers} layers, {batch_size} sequences"
            print(f"  {where}, {system}: {said}", file=sys.stderr, flush=True)
        return self._made[key]

    def deepest(self, system: str, most: int) -> int:
        """The most layers that fit, in steps, by doubling and halving; 0: none do."""
        fits, fails, probe = 0, most // STEP + 1, 4
        while fails - fits > 1:
            probe = min(probe, (fits + fails) // 2)
            if self.plan(system, probe * STEP, BATCH_SIZE):
                fits, probe = probe, 2 * probe
            else:
                fails = probe
        return fits * STEP


def tokens_per_s(plan: Plan) -> float:
    """As predicted."""
    assert plan.prediction
    return plan.batch_size * LENGTH / plan.prediction.step_s


def page(clusters: Sequence[Cluster], most_layers: int) -> Iterator[str]:
    """Blocks of Markdown."""
    yield HEAD
    for cluster in clusters:
        yield from section(cluster, most_layers)


def section(cluster: Cluster, most_layers: int) -> Iterator[str]:
    """One cluster's tables."""
    plans = Plans(cluster)
    cards = ", ".join(
        f"{sum(d.kind == kind for d in cluster.devices)}x {kind}"
        for kind in dict.fromkeys(d.kind for d in cluster.devices)
    )
    yield f"## {cluster.name}: {cards}"
    deepest = {system: plans.deepest(system, most_layers) for system in SYSTEMS}
    yield (
        f"The largest model that fits, at {BATCH_SIZE} sequences a step, of "
        f"{most_layers} layers at most:"
    )
    yield table(
        ("", "layers", "parameters", "tokens/s"),
        [
            (
                system,
                str(layers),
                f"{model(layers).num_params / 1e9:.2f} billion" if layers else "none",
                said(plans.plan(system, layers, BATCH_SIZE) if layers else None),
            )
            for system, layers in deepest.items()
        ],
    )
    least = min(deepest.values())
    yield (
        f"Tokens a second at {least} layers, which all fit, by sequences a step. More\n"
        "are more microbatches, for which no card needs more memory."
    )
    yield table(
        ("sequences", *SYSTEMS),
        [
            (str(size), *(said(plans.plan(system, least, size)) for system in SYSTEMS))
            for size in BATCH_SIZES
        ],
    )


def said(plan: Plan | None) -> str:
    """Of a table."""
    return f"{tokens_per_s(plan):,.0f}" if plan else "does not fit"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; all but the first column are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the page, and each plan to stderr as it is made."""
    parser = argparse.ArgumentParser(prog="python -m experiments.state_table")
    parser.add_argument("clusters", nargs="*", default=CLUSTERS)
    parser.add_argument("--layers", type=int, default=128, help="most to try")
    arguments = parser.parse_args(argv)
    files = [f"experiments/clusters/{name}.toml" for name in arguments.clusters]
    clusters = [Cluster.from_toml(file) for file in files]
    print("\n\n".join(page(clusters, arguments.layers)))


if __name__ == "__main__":
    main()
