"""How many replicas of which form: an exact program over counts of equal devices.

    Cluster -> forms a replica may take -> how many of each (CP-SAT) -> Layout

Devices of one kind in nodes of one size count as equal (AutoHet's device grouping,
arXiv 2512.20953, with the balance of load in the objective). A form says how many of
which class a replica has and in which meshes; its pace comes from the exact split of
layers. For a deadline the program takes the forms whose samples together are most, so
the throughput of unlike replicas adds up and no device waits for another's share.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hexijax.planner.batches import BatchOption
from hexijax.planner.fit import PACE, Fitter
from hexijax.planner.forms import Form, Forms, Slot, demand, form_size, scales
from hexijax.planner.mesh import Layout
from hexijax.planner.tables import Setting

PARAMETERS = (
    "max_deterministic_time:0.5 num_workers:1 random_seed:0 relative_gap_limit:0 "
    "catch_sigint_signal:false"
)
"""Of the solver. Sizes here need a hundredth of its deterministic seconds; it would
take Ctrl-C for good."""

MAX_CLASSES_JOINED = 3
"""Classes of devices in one replica; all of them are tried too."""

ALONE_IS_GOOD = 0.97
"""Of the pace of a device that has the model alone: classes that reach it in replicas
of their own gain nothing from joining others."""

FORMS_A_SIZE = 3
"""Ways to cut a replica of one size into meshes that are kept, fastest first."""

JOINED_A_SIZE = 12
"""The same of replicas of several classes, which have an order too."""

SLOWER = 2
"""Of them, in a row, that their classes alone are faster than: in two orders, in narrow
and in wide meshes. More of their size are not fitted."""

NEAR = 0.005
"""A form that promises so little more is not fitted."""

SCALE = 4
"""Between one number of replicas that is tried and the next."""

PATIENCE = 2
"""Sizes without gain before larger replicas are given up."""


class Mixtures:
    """Layouts that mix forms of replicas."""

    def __init__(
        self,
        forms: Forms,
        fitter: Fitter,
        *,
        degrees: Sequence[int],
        num_layers: int,
        batch_size: int,
        use_all: bool = False,
    ) -> None:
        self._forms = forms
        self._classes = forms.classes
        self._fitter = fitter
        self._degrees = degrees
        self._num_layers = num_layers
        self._batch_size = batch_size
        self._use_all = use_all

    def layouts(self, per_segment: int | None, bound_s: float) -> Iterator[Layout]:
        """Layouts for each scale of the number of replicas, and each deadline.

        Many replicas have short pipelines and send many gradients; few have long ones
        that send activations. Which is better the score says.
        """
        num_devices = sum(cls.count for cls in self._classes)
        seen: set[object] = set()
        for most in _powers(min(num_devices, self._batch_size)):
            fewest = max(1, most // SCALE)
            options = self._options(per_segment, num_devices / most)
            for slack in (1.05, 1.5):
                counts = self._solve(options, bound_s * slack, fewest, most)
                for _ in range(2):
                    key = tuple(sorted(counts.items(), key=repr))
                    if not counts or key in seen:
                        break
                    seen.add(key)
                    layout = self._forms.place(counts)
                    if layout:
                        yield layout
                    end_s = self._end_s(options, counts)
                    counts = self._solve(options, end_s, fewest, most)

    def _options(
        self, per_segment: int | None, least_devices: float
    ) -> dict[Form, list[BatchOption]]:
        """The forms worth mixing, with their paces.

        Those of about as many devices as a replica has where there are so few.
        """
        found: dict[Form, list[BatchOption]] = {}
        alone: list[float] = []
        reached = 1.0
        for at in range(len(self._classes)):
            best = max(
                (self._forms.ideal(form) for form in self._forms.pure(at)), default=0.0
            )
            totals = self._by_total(self._forms.pure(at), least_devices)
            rate = self._climb(totals, per_segment, found)
            alone.append(rate)
            reached = min(reached, rate / best if best else 1.0)
        if reached < ALONE_IS_GOOD:
            for chosen in self._subsets():
                joined = self._by_total(self._joined(chosen), least_devices)
                self._climb(joined, per_segment, found, JOINED_A_SIZE, alone)
        return found

    def _by_total(
        self, forms: Iterable[Form], least_devices: float
    ) -> list[list[Form]]:
        """Forms of equal size together, small before large, the fastest first."""
        totals: dict[int, list[Form]] = {}
        for form in dict.fromkeys(forms):
            size = form_size(form) / least_devices
            if len(form) <= self._num_layers and 1 / SCALE <= size <= SCALE * 2:
                totals.setdefault(form_size(form), []).append(form)
        return [
            sorted(totals[total], key=lambda form: -self._forms.ideal(form))
            for total in sorted(totals)
        ]

    def _climb(
        self,
        totals: Sequence[Sequence[Form]],
        per_segment: int | None,
        found: dict[Form, list[BatchOption]],
        most: int = FORMS_A_SIZE,
        alone: Sequence[float] = (),
    ) -> float:
        """Fits larger and larger replicas while a device's pace still grows.

        ``alone``: paces of a device of each class among its own, to be better than.
        """
        best, worse = 0.0, 0
        for forms in totals:
            here, fitting, slower = 0.0, 0, 0
            setting = self._setting(form_size(forms[0]), per_segment)
            for form in forms:
                if fitting == most or self._forms.ideal(form) < here * (1 + NEAR):
                    break
                if slower == SLOWER:
                    break
                meshes = self._forms.meshes(form)
                fits = self._fitter.fits(meshes, setting, slacks=PACE) if meshes else ()
                if fits:
                    fitting += 1
                    found[form] = [f.option for f in fits]
                    pace = max(f.option.size / f.option.next_s for f in fits)
                    here = max(here, pace / form_size(form))
                    apart = sum(alone[slot.at] * slot.devices for slot in form if alone)
                    slower = slower + 1 if pace <= apart else 0
            worse = worse + 1 if here <= best * (1 + NEAR) and best else 0
            best = max(best, here)
            if worse >= PATIENCE:
                break
        return best

    def _setting(self, size: int, per_segment: int | None) -> Setting:
        """Of replicas of a size, were there a part of those that all devices make."""
        total = sum(cls.count for cls in self._classes)
        fewest = max(1, min(total // size, self._batch_size) // SCALE)
        return Setting(
            batch_size=self._batch_size,
            elsewhere=fewest - 1,
            members=fewest,
            per_segment=per_segment,
        )

    def _subsets(self) -> list[tuple[int, ...]]:
        """Classes that may share a replica."""
        indices = range(len(self._classes))
        most = min(len(self._classes), MAX_CLASSES_JOINED)
        subsets = [
            chosen
            for count in range(2, most + 1)
            for chosen in itertools.combinations(indices, count)
        ]
        if len(self._classes) > MAX_CLASSES_JOINED:
            subsets.append(tuple(indices))
        return subsets

    def _joined(self, chosen: Sequence[int]) -> Iterator[Form]:
        """Replicas of several classes, each with its share of devices: rounded down,
        and up, so that unlike replicas can use them all."""
        counts = [self._classes[at].count for at in chosen]
        few = len(chosen) <= MAX_CLASSES_JOINED
        for replicas in scales(min(counts)):
            for tensor, whole in itertools.product(self._degrees, (False, True)):
                runs = [
                    [
                        run
                        for share in {count // replicas, -(-count // replicas)}
                        for run in self._runs(at, share, tensor, whole=whole)
                    ]
                    for at, count in zip(chosen, counts, strict=True)
                ]
                for picked in itertools.product(*runs):
                    orders = itertools.permutations(picked) if few else (picked,)
                    for order in orders:
                        yield tuple(itertools.chain(*order))

    def _runs(self, at: int, share: int, tensor: int, *, whole: bool) -> list[Form]:
        """Ways to make stages of a class's share: alike, or one wider than another."""
        per_block = self._classes[at].per_block
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
        from ortools.linear_solver import pywraplp  # its own API of CP-SAT loads pandas

        rooms = {
            form: max(_room(option, deadline_s) for option in found)
            for form, found in options.items()
        }
        rooms = {form: room for form, room in rooms.items() if room > 0}
        if not rooms:
            return {}
        solver = pywraplp.Solver.CreateSolver("SAT")
        solver.SetSolverSpecificParametersAsString(PARAMETERS)
        num_devices = [cls.count for cls in self._classes]
        counts: dict[Form, pywraplp.Variable] = {}
        for i, form in enumerate(rooms):
            need = demand(form, len(self._classes))
            room = min(n // d for n, d in zip(num_devices, need, strict=True) if d)
            counts[form] = solver.IntVar(0, room, f"form {i}")
        for at, have in enumerate(num_devices):
            taken = solver.Constraint(have if self._use_all else 0, have)
            for form, count in counts.items():
                taken.SetCoefficient(count, demand(form, len(self._classes))[at])
        replicas = solver.Constraint(0, most)
        lanes = solver.Constraint(fewest, solver.infinity())
        objective = solver.Objective()
        for form, count in counts.items():
            replicas.SetCoefficient(count, 1)
            lanes.SetCoefficient(count, min(slot.devices for slot in form))
            # Of equal throughput the fewest replicas: each sends its gradients.
            objective.SetCoefficient(count, int(rooms[form] * 1000) - 1)
        objective.SetMaximization()
        if solver.Solve() not in (solver.OPTIMAL, solver.FEASIBLE):
            return {}
        found = {form: round(count.solution_value()) for form, count in counts.items()}
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


def _powers(most: int) -> list[int]:
    """``most``, a quarter of it, and so on to one."""
    found = [most]
    while found[-1] > 1:
        found.append(max(1, found[-1] // SCALE))
    return found


def _room(option: BatchOption, deadline_s: float) -> float:
    """Samples by a deadline, between whole microbatches too: batches come later."""
    over_s = deadline_s - option.first_s
    if over_s < 0:
        return 0.0
    return option.size * (1 + over_s / option.next_s)
