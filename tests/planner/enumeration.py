"""Every plan of a small cluster and a short chain: the search that nothing escapes.

    Cluster -> layouts (who computes with whom) -> bounds of every choice -> predict

Over grouping (devices may stay unused), order of stages and replicas, lanes and tensor
degree, layers of each stage, samples, microbatch size and count of each replica; one
remat policy, one segment a stage. It shares the simulator and the costs with the
planner and none of its decisions.

What cannot beat the best so far is not simulated. ``Bounds`` are lower bounds by
construction, and each plan that is simulated is held to its own: `AssertionError` if
one is broken. Plans that differ by the names of identical devices only are tried once.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.simulator import predict
from tests.planner.bounds import Bounds, Mesh

Meshes = tuple[Mesh, ...]
"""A replica's, in the order of its stages."""

SHUFFLED = 1.005
"""Plans within this of the best are tried with their replicas in every order: it moves
a step by less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What one replica may do, and the least that a step then takes."""

    bound_s: float
    meshes: Meshes
    edges: tuple[int, ...]
    """First layers of the stages, and the number of layers."""
    samples: int
    microbatches: int
    size: int


@dataclasses.dataclass(slots=True)
class Found:
    """The best of all plans."""

    plan: Plan | None
    step_s: float
    simulated: int = 0
    """Plans played, of those that were left after bounds."""
    considered: int = 0
    """Combinations of choices met."""


def enumerate_plans(
    chain: Chain,
    cluster: Cluster,
    batch_size: int,
    *,
    remat: Remat = Remat.NONE,
    dtype: str = "float32",
    below_s: float = math.inf,
) -> Found:
    """The fastest plan, or none where no plan is faster than ``below_s``."""
    search = _Search(chain, cluster, batch_size, remat, dtype, below_s)
    layouts = list(distinct_layouts(cluster, chain))
    # Promising ones first, and of each its most promising plan first, so that most
    # are met with a short best.
    layouts.sort(key=lambda layout: search.bounds.ideal_s(layout, batch_size))
    for first in (True, False):
        for layout in layouts:
            search.layout(layout, only_first=first)
    return search.found


def distinct_layouts(cluster: Cluster, chain: Chain) -> Iterator[tuple[Meshes, ...]]:
    """Every way to make replicas of meshes of devices, identical ones merged."""
    names = [device.name for device in cluster.devices]
    symmetries = automorphisms(cluster)
    seen: set[object] = set()
    for used in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, used):
            for groups in partitions(list(chosen)):
                pipelines = [list(_pipelines(g, cluster, chain)) for g in groups]
                for layout in itertools.product(*pipelines):
                    key = canonical(layout, symmetries)
                    if key not in seen:
                        seen.add(key)
                        yield layout


def canonical(
    replicas: Sequence[object], symmetries: Sequence[dict[str, str]]
) -> object:
    """One name for all that differ by a symmetry or by the order of replicas.

    A replica is a tuple of meshes, or such a tuple first in a larger one.
    """

    def renamed(part: object, names: dict[str, str]) -> object:
        if isinstance(part, Mesh):
            devices = tuple(sorted(names[d] for d in part.devices))
            return (devices, part.lanes, part.tensor)
        if isinstance(part, tuple):
            return tuple(renamed(p, names) for p in part)
        return part

    return min(
        (tuple(sorted(repr(renamed(r, names)) for r in replicas)))
        for names in symmetries
    )


def automorphisms(cluster: Cluster) -> list[dict[str, str]]:
    """Renamings of devices that leave kinds, memory, islands, nodes and links alone."""
    devices = cluster.devices

    def alike(order: Sequence[int]) -> bool:
        renamed = [devices[i] for i in order]
        if any(
            (a.kind, a.usable_memory_bytes) != (b.kind, b.usable_memory_bytes)
            for a, b in zip(devices, renamed, strict=True)
        ):
            return False
        pairs = itertools.combinations(range(len(devices)), 2)
        return all(
            cluster.link(devices[i], devices[j]) == cluster.link(renamed[i], renamed[j])
            and (devices[i].node == devices[j].node)
            == (renamed[i].node == renamed[j].node)
            for i, j in pairs
        )

    return [
        {d.name: devices[i].name for d, i in zip(devices, order, strict=True)}
        for order in itertools.permutations(range(len(devices)))
        if alike(order)
    ]


def partitions(items: list[str]) -> Iterator[list[list[str]]]:
    """Every division into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for others in partitions(rest):
        yield [[first], *others]
        for i in range(len(others)):
            yield [*others[:i], [first, *others[i]], *others[i + 1 :]]


def _pipelines(group: list[str], cluster: Cluster, chain: Chain) -> Iterator[Meshes]:
    """Every order of meshes made of all devices of a group."""
    for parts in partitions(group):
        if len(parts) > len(chain.layers):
            continue
        forms = [list(_meshes(tuple(part), cluster, chain)) for part in parts]
        for order in itertools.permutations(range(len(parts))):
            yield from itertools.product(*(forms[i] for i in order))


def _meshes(names: tuple[str, ...], cluster: Cluster, chain: Chain) -> Iterator[Mesh]:
    """The forms of a mesh of these devices: one kind, one island; tensor in a node."""
    devices = [cluster.device(name) for name in names]
    if len({(d.kind, d.island) for d in devices}) > 1:
        return
    sizes = [
        leaf.shape[leaf.tensor_dim]
        for leaf in chain.leaves()
        if leaf.tensor_dim is not None
    ]
    for tensor in range(1, len(names) + 1):
        if len(names) % tensor == 0 and all(size % tensor == 0 for size in sizes):
            yield Mesh(names, len(names) // tensor, tensor)


def counts(samples: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(microbatches, size): for every count the smallest size that lanes divide.

    A larger size of the same count takes longer and more memory.
    """
    sizes: set[int] = set()
    for microbatches in range(samples, 0, -1):
        size = -(-samples // (microbatches * lanes)) * lanes
        if size not in sizes and (microbatches - 1) * size < samples:
            sizes.add(size)
            yield -(-samples // size), size


class _Search:
    """The best plan so far, and what cannot beat it."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        batch_size: int,
        remat: Remat,
        dtype: str,
        below_s: float,
    ) -> None:
        self.bounds = Bounds(chain, cluster, remat, dtype)
        self.found = Found(plan=None, step_s=below_s)
        self._chain, self._cluster = chain, cluster
        self._batch_size, self._remat, self._dtype = batch_size, remat, dtype
        self._symmetries = automorphisms(cluster)
        self._seen: set[object] = set()

    def layout(self, layout: tuple[Meshes, ...], *, only_first: bool) -> None:
        """Tries every choice of every replica, or the one of the lowest bound."""
        if self.bounds.ideal_s(layout, self._batch_size) >= self.found.step_s:
            return
        others = len(layout) - 1
        most = self._batch_size - others
        least = self._batch_size if not others else 1
        options = [
            {n: self._choices(meshes, n, others) for n in range(least, most + 1)}
            for meshes in layout
        ]
        splits = [
            (max(o[n][0].bound_s if o[n] else math.inf for o, n in pairs), ns)
            for ns in _sums(self._batch_size, len(layout))
            for pairs in [list(zip(options, ns, strict=True))]
        ]
        for bound_s, ns in sorted(splits):
            if bound_s >= self.found.step_s:
                break
            chosen = [o[n] for o, n in zip(options, ns, strict=True)]
            if only_first:
                self._try(tuple(choices[0] for choices in chosen))
                break
            self._combine(chosen)

    def _choices(self, meshes: Meshes, samples: int, others: int) -> list[Choice]:
        """A replica's choices that may beat the best, by bound."""
        lanes = math.lcm(*(mesh.lanes for mesh in meshes))
        num_layers = len(self._chain.layers)
        inner = itertools.combinations(range(1, num_layers), len(meshes) - 1)
        made = []
        for edges in [(0, *middle, num_layers) for middle in inner]:
            for microbatches, size in counts(samples, lanes):
                bound_s = self.bounds.step_s(meshes, edges, microbatches, size, others)
                if bound_s < self.found.step_s and self.bounds.may_fit(
                    meshes, edges, microbatches, size
                ):
                    made.append(
                        Choice(bound_s, meshes, edges, samples, microbatches, size)
                    )
        return sorted(made, key=lambda choice: choice.bound_s)

    def _combine(self, options: list[list[Choice]]) -> None:
        """Every combination of the replicas' choices, the lowest bounds first."""
        heads = [o[: self._room(o)] for o in options]
        combos = sorted(
            itertools.product(*heads), key=lambda c: sum(x.bound_s for x in c)
        )
        for combo in combos:
            if max(choice.bound_s for choice in combo) < self.found.step_s:
                self._try(combo)

    def _room(self, choices: list[Choice]) -> int:
        return sum(choice.bound_s < self.found.step_s for choice in choices)

    def _try(self, combo: tuple[Choice, ...]) -> None:
        self.found.considered += 1
        choices = [(c.meshes, c.edges, c.samples, c.size) for c in combo]
        key = canonical(choices, self._symmetries)
        if key in self._seen:
            return
        self._seen.add(key)
        replicas = [self._replica(choice) for choice in combo]
        bound_s = max(choice.bound_s for choice in combo)
        step_s = self._step_s(replicas, bound_s)
        if step_s < self.found.step_s * SHUFFLED:
            for order in list(itertools.permutations(replicas))[1:]:
                self._step_s(list(order), bound_s)

    def _step_s(self, replicas: list[Replica], bound_s: float) -> float:
        """Seconds of a plan; the best is kept. Infinite where it does not fit."""
        plan = Plan(replicas=tuple(replicas), batch_size=self._batch_size)
        for name, parts in plan_memory(plan, self._chain, self._cluster).items():
            if parts.total_bytes > self._cluster.device(name).usable_memory_bytes:
                return math.inf
        self.found.simulated += 1
        step_s = predict(plan, self._chain, self._cluster).step_s
        assert step_s >= bound_s * (1 - 1e-9), (step_s, bound_s, plan)
        if step_s < self.found.step_s:
            self.found.step_s, self.found.plan = step_s, plan
        return step_s

    def _replica(self, choice: Choice) -> Replica:
        edges = itertools.pairwise(choice.edges)
        return Replica(
            stages=tuple(
                Stage(
                    devices=mesh.devices,
                    layers=layers,
                    lanes=mesh.lanes,
                    tensor=mesh.tensor,
                    dtype=self._dtype,
                    remat=(self._remat,) * (layers[1] - layers[0]),
                )
                for mesh, layers in zip(choice.meshes, edges, strict=True)
            ),
            microbatches=choice.microbatches,
            microbatch_size=choice.size,
            samples=choice.samples,
        )


def _sums(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as so many positive ones, in order."""
    for inner in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *inner, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))
