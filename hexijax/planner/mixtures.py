"""How many replicas of which form: an exact program over counts of equal devices.

    Cluster -> forms a replica may take -> how many of each (CP-SAT) -> Layout

Devices of one kind in nodes of one size count as equal (AutoHet's device grouping,
arXiv 2512.20953, with the balance of load in the objective). A form says how many of
which class a replica has and in which meshes; its pace comes from the exact split of
layers. For a deadline the program takes the forms whose samples together are most, so
the throughput of unlike replicas adds up and no device waits for another's share.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ortools.sat.python import cp_model

from hexijax.cluster import Cluster
from hexijax.planner.batches import BatchOption
from hexijax.planner.bound import sizes_up_to
from hexijax.planner.fit import Fitter, Setting
from hexijax.planner.mesh import Layout, Mesh, MeshMaker

EFFORT = 0.5
"""Deterministic solver seconds of one program; sizes here need a hundredth."""

MAX_CLASSES_JOINED = 3
"""Classes of devices in one replica; all of them are tried too."""

ALONE_IS_GOOD = 0.97
"""Of the pace of a device that has the model alone: classes that reach it in replicas
of their own gain nothing from joining others."""

FORMS_A_SIZE = 3
"""Ways to cut a replica of one size into meshes that are kept, fastest first."""

JOINED_A_SIZE = 12
"""The same of replicas of several classes, which have an order too."""

NEAR = 0.005
"""A form that promises so little more is not fitted."""

SCALE = 4
"""Between one number of replicas that is tried and the next."""

PATIENCE = 2
"""Sizes without gain before larger replicas are given up."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClass:
    """Devices that count as equal."""

    blocks: tuple[tuple[str, ...], ...]
    """Devices of each node that has some."""

    @property
    def per_block(self) -> int:
        """Devices in each node."""
        return len(self.blocks[0])

    @property
    def count(self) -> int:
        """Devices of all nodes."""
        return sum(map(len, self.blocks))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A stage's mesh, any devices of a class."""

    at: int
    """Index of the class."""

    devices: int
    """How many."""

    tensor: int
    """Tensor degree."""


Form = tuple[Slot, ...]
"""Slots of a replica, in the order of its stages."""


def device_classes(
    cluster: Cluster, only: str | None = None
) -> tuple[DeviceClass, ...]:
    """The classes of a cluster, or of its devices of one kind, roomiest first."""
    blocks: dict[tuple[str, str, int], list[str]] = {}
    for device in cluster.devices:
        if only not in (None, device.kind):
            continue
        key = (device.node, device.kind, device.usable_memory_bytes)
        blocks.setdefault(key, []).append(device.name)
    classes: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for (name, kind, usable), devices in blocks.items():
        node = cluster.node(name)
        key = (kind, -usable, len(devices), node.site, node.link, node.nic)
        classes.setdefault(key, []).append(tuple(devices))
    found = [DeviceClass(blocks=tuple(x)) for x in classes.values()]

    def room(cls: DeviceClass) -> int:
        return cluster.device(cls.blocks[0][0]).usable_memory_bytes

    return tuple(sorted(found, key=room, reverse=True))


class Mixtures:
    """Layouts that mix forms of replicas."""

    def __init__(
        self,
        cluster: Cluster,
        maker: MeshMaker,
        fitter: Fitter,
        *,
        degrees: Sequence[int],
        num_layers: int,
        batch_size: int,
        use_all: bool = False,
        kind: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._maker = maker
        self._fitter = fitter
        self._degrees = degrees
        self._num_layers = num_layers
        self._batch_size = batch_size
        self._use_all = use_all
        self.classes = device_classes(cluster, kind)
        self._meshes: dict[Form, tuple[Mesh, ...] | None] = {}
        self._ideals: dict[Form, float] = {}
        self._sizes = sizes_up_to(batch_size)

    def layouts(self, per_segment: int | None, bound_s: float) -> Iterator[Layout]:
        """Layouts for each scale of the number of replicas, and each deadline.

        Many replicas have short pipelines and send many gradients; few have long ones
        that send activations. Which is better the score says.
        """
        num_devices = sum(cls.count for cls in self.classes)
        seen: set[object] = set()
        for most in _powers(min(num_devices, self._batch_size)):
            fewest = max(1, most // SCALE)
            setting = Setting(
                batch_size=self._batch_size,
                state_devices=fewest,
                members=fewest,
                per_segment=per_segment,
            )
            options = self._options(setting, num_devices / most)
            for slack in (1.05, 1.5):
                counts = self._solve(options, bound_s * slack, fewest, most)
                for _ in range(2):
                    key = tuple(sorted(counts.items(), key=repr))
                    if not counts or key in seen:
                        break
                    seen.add(key)
                    layout = self.place(counts)
                    if layout:
                        yield layout
                    end_s = self._end_s(options, counts)
                    counts = self._solve(options, end_s, fewest, most)

    def _options(
        self, setting: Setting, least_devices: float
    ) -> dict[Form, list[BatchOption]]:
        """The forms worth mixing, with their paces.

        Those of about as many devices as a replica has where there are so few.
        """
        found: dict[Form, list[BatchOption]] = {}
        reached = 1.0
        for at in range(len(self.classes)):
            best = max((self._ideal(form) for form in self._pure(at)), default=0.0)
            totals = self._by_total(self._pure(at), least_devices)
            rate = self._climb(totals, setting, found)
            reached = min(reached, rate / best if best else 1.0)
        if reached < ALONE_IS_GOOD:
            for chosen in self._subsets():
                joined = self._by_total(self._joined(chosen), least_devices)
                self._climb(joined, setting, found, JOINED_A_SIZE)
        return found

    def _by_total(
        self, forms: Iterable[Form], least_devices: float
    ) -> list[list[Form]]:
        """Forms of equal size together, small before large, the fastest first."""
        totals: dict[int, list[Form]] = {}
        for form in dict.fromkeys(forms):
            size = _size(form) / least_devices
            if len(form) <= self._num_layers and 1 / SCALE <= size <= SCALE * 2:
                totals.setdefault(_size(form), []).append(form)
        return [
            sorted(totals[total], key=lambda form: -self._ideal(form))
            for total in sorted(totals)
        ]

    def _climb(
        self,
        totals: Sequence[Sequence[Form]],
        setting: Setting,
        found: dict[Form, list[BatchOption]],
        most: int = FORMS_A_SIZE,
    ) -> float:
        """Fits larger and larger replicas while a device's pace still grows."""
        best, worse = 0.0, 0
        for forms in totals:
            here, fitting = 0.0, 0
            for form in forms:
                if fitting == most or self._ideal(form) < here * (1 + NEAR):
                    break
                meshes = self.meshes(form)
                fits = self._fitter.fits(meshes, setting) if meshes else ()
                if fits:
                    fitting += 1
                    found[form] = [f.option for f in fits]
                    pace = max(f.option.size / f.option.next_s for f in fits)
                    here = max(here, pace / _size(form))
            worse = worse + 1 if here <= best * (1 + NEAR) and best else 0
            best = max(best, here)
            if worse >= PATIENCE:
                break
        return best

    def _ideal(self, form: Form) -> float:
        """Samples a second and device, were its stages always busy and all did fit."""
        if form not in self._ideals:
            meshes = self.meshes(form)
            rate = 0.0
            if meshes:
                rate = 1 / self._fitter.bound_s((meshes,), self._sizes) / _size(form)
            self._ideals[form] = rate
        return self._ideals[form]

    def meshes(self, form: Form) -> tuple[Mesh, ...] | None:
        """A form on the first devices there are."""
        if form not in self._meshes:
            layout = self.place({form: 1})
            self._meshes[form] = layout[0] if layout else None
        return self._meshes[form]

    def _pure(self, at: int) -> Iterator[Form]:
        """Replicas of one class: parts of a node, a node, or several nodes."""
        cls = self.classes[at]
        per_block, num_blocks = cls.per_block, len(cls.blocks)
        sizes = [n for n in range(1, per_block + 1) if per_block % n == 0]
        nodes = [k for k in _scales(num_blocks) if k > 1]
        for total, tensor in itertools.product(
            [*sizes, *(k * per_block for k in nodes)], self._degrees
        ):
            for width in sizes:
                if width % tensor == 0 and total % width == 0:
                    slot = Slot(at=at, devices=width, tensor=tensor)
                    yield (slot,) * (total // width)

    def _subsets(self) -> list[tuple[int, ...]]:
        """Classes that may share a replica."""
        indices = range(len(self.classes))
        most = min(len(self.classes), MAX_CLASSES_JOINED)
        subsets = [
            chosen
            for count in range(2, most + 1)
            for chosen in itertools.combinations(indices, count)
        ]
        if len(self.classes) > MAX_CLASSES_JOINED:
            subsets.append(tuple(indices))
        return subsets

    def _joined(self, chosen: Sequence[int]) -> Iterator[Form]:
        """Replicas of several classes, each with its share of the devices."""
        counts = [self.classes[at].count for at in chosen]
        few = len(chosen) <= MAX_CLASSES_JOINED
        for replicas in _scales(min(counts)):
            for tensor, whole in itertools.product(self._degrees, (False, True)):
                runs = [
                    self._runs(at, count // replicas, tensor, whole=whole)
                    for at, count in zip(chosen, counts, strict=True)
                ]
                for picked in itertools.product(*runs):
                    orders = itertools.permutations(picked) if few else (picked,)
                    for order in orders:
                        yield tuple(itertools.chain(*order))

    def _runs(self, at: int, share: int, tensor: int, *, whole: bool) -> list[Form]:
        """Ways to make stages of a class's share: alike, or one wider than another."""
        per_block = self.classes[at].per_block
        degree = tensor if per_block % tensor == 0 else 1
        width = per_block if whole and share >= per_block else degree
        slot = Slot(at=at, devices=width, tensor=degree)
        runs: list[Form] = [(slot,) * (share // width)] if share >= width else []
        if width == 1 and 3 <= share <= per_block:
            wide = Slot(at=at, devices=share - 1, tensor=1)
            runs += [(slot, wide), (wide, slot)]
        return runs

    def _solve(
        self,
        options: dict[Form, list[BatchOption]],
        deadline_s: float,
        fewest: int,
        most: int,
    ) -> dict[Form, int]:
        """How many of each form take most samples by a deadline.

        They are at most so many, and their state is spread over as many devices as
        their paces suppose.
        """
        rooms = {
            form: max(_room(option, deadline_s) for option in found)
            for form, found in options.items()
        }
        rooms = {form: room for form, room in rooms.items() if room > 0}
        if not rooms:
            return {}
        model = cp_model.CpModel()
        num_devices = [cls.count for cls in self.classes]
        counts: dict[Form, cp_model.IntVar] = {}
        for i, form in enumerate(rooms):
            need = _demand(form, len(self.classes))
            room = min(n // d for n, d in zip(num_devices, need, strict=True) if d)
            counts[form] = model.new_int_var(0, room, f"form {i}")
        for at, have in enumerate(num_devices):
            taken = sum(
                _demand(form, len(self.classes))[at] * count
                for form, count in counts.items()
            )
            model.add(taken == have if self._use_all else taken <= have)
        model.add(sum(counts.values()) <= most)
        model.add(
            sum(min(slot.devices for slot in f) * n for f, n in counts.items())
            >= fewest
        )
        # Of equal throughput the fewest replicas: each sends its gradients.
        model.maximize(
            sum((int(rooms[form] * 1000) - 1) * count for form, count in counts.items())
        )
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = EFFORT
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C for good
        solver.parameters.random_seed = 0
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return {}
        found = {form: solver.value(count) for form, count in counts.items()}
        return {form: count for form, count in found.items() if count}

    def _end_s(
        self, options: dict[Form, list[BatchOption]], counts: dict[Form, int]
    ) -> float:
        """When these replicas have taken the batch, by bisection."""
        low_s = 0.0
        high_s = max(
            min(o.end_s(-(-self._batch_size // o.size)) for o in options[form])
            for form in counts
        )
        for _ in range(30):
            middle_s = (low_s + high_s) / 2
            room = sum(
                count * max(_room(o, middle_s) for o in options[form])
                for form, count in counts.items()
            )
            low_s, high_s = (
                (low_s, middle_s) if room >= self._batch_size else (middle_s, high_s)
            )
        return high_s

    def place(self, counts: dict[Form, int]) -> Layout | None:
        """Devices for each slot: a replica stays in a node where it can.

        None where nodes cannot be cut that way.
        """
        forms = [
            form
            for form in sorted(counts, key=lambda form: (-_size(form), repr(form)))
            for _ in range(counts[form])
        ]
        free = self._all_free()
        taken = [self._take(form, free) for form in forms]
        layout = tuple(meshes for meshes in taken if meshes is not None)
        return layout if len(layout) == len(forms) else self._pack(forms)

    def _all_free(self) -> list[list[list[str]]]:
        return [[list(block) for block in cls.blocks] for cls in self.classes]

    def _pack(self, forms: Sequence[Form]) -> Layout | None:
        """The widest slots of all replicas first, each beside its replica's others."""
        free = self._all_free()
        slots = [(r, k) for r, form in enumerate(forms) for k in range(len(form))]
        slots.sort(key=lambda at: -forms[at[0]][at[1]].devices)
        blocks: dict[tuple[int, int], list[str]] = {}
        meshes: dict[tuple[int, int], Mesh] = {}
        for r, k in slots:
            slot = forms[r][k]
            block = blocks.get((r, slot.at))
            if block is None or len(block) < slot.devices:
                block = _fullest(free[slot.at], slot.devices, slot.devices)
            if block is None:
                return None
            blocks[r, slot.at] = block
            names = tuple(block[: slot.devices])
            del block[: slot.devices]
            meshes[r, k] = self._maker.mesh(names, slot.tensor)
        return tuple(
            tuple(meshes[r, k] for k in range(len(form)))
            for r, form in enumerate(forms)
        )

    def _take(self, form: Form, free: list[list[list[str]]]) -> tuple[Mesh, ...] | None:
        demand = _demand(form, len(self.classes))
        current: dict[int, list[str]] = {}
        meshes: list[Mesh] = []
        for slot in form:
            block = current.get(slot.at)
            if block is None or len(block) < slot.devices:
                block = _fullest(free[slot.at], slot.devices, demand[slot.at])
                if block is None:
                    return None
                current[slot.at] = block
            demand[slot.at] -= slot.devices
            names = tuple(block[: slot.devices])
            del block[: slot.devices]
            meshes.append(self._maker.mesh(names, slot.tensor))
        return tuple(meshes)


def _fullest(blocks: Sequence[list[str]], least: int, demand: int) -> list[str] | None:
    """The smallest block with room for all, else the one with most room."""
    roomy = [block for block in blocks if len(block) >= least]
    if not roomy:
        return None
    whole = [block for block in roomy if len(block) >= demand]
    return min(whole, key=len) if whole else max(roomy, key=len)


def _scales(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and what divides ``most``, up to it."""
    found = {n for k in range(most.bit_length()) for n in (2**k, 3 * 2**k)}
    divisors = {most // n for n in range(1, 9) if most % n == 0}
    return sorted(n for n in found | divisors if n <= most)


def _powers(most: int) -> list[int]:
    """``most``, a quarter of it, and so on to one."""
    found = [most]
    while found[-1] > 1:
        found.append(max(1, found[-1] // SCALE))
    return found


def _size(form: Form) -> int:
    return sum(slot.devices for slot in form)


def _demand(form: Form, num_classes: int) -> list[int]:
    need = [0] * num_classes
    for slot in form:
        need[slot.at] += slot.devices
    return need


def _room(option: BatchOption, deadline_s: float) -> float:
    """Samples by a deadline, between whole microbatches too: batches come later."""
    over_s = deadline_s - option.first_s
    if over_s < 0:
        return 0.0
    return option.size * (1 + over_s / option.next_s)
