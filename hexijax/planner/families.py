"""Layouts whose replicas are few and alike: what sums and activations cost least in.

    Forms -> families, spread -> (Layout, ...), to be scored as they come

Where links are slow, sums and activations cost more than compute, and what the exact
program over paces takes for best is far from it: how many replicas there are, how many
nodes each spans and which devices stay out decides. The two ways of HexiScale's
grouping: fast links inside pipelines, when each class alone is cut into replicas of
every size and the best of each are put together; or fast links between them, when every
replica has a share of every class, in one order, and sums stay in the node.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hexijax.planner.forms import Form, Forms, Slot, form_size, scales
from hexijax.planner.mesh import Layout

WIDTHS = 3
"""Forms of one size that are tried: meshes of one device, of some, of a node."""

KEPT = 2
"""Of each class, put together with those of others."""

MOST_TOGETHER = 48
"""Of the layouts of several classes."""

MOST_ORDERED = 3
"""Classes whose every order in a pipeline is tried."""

Counts = dict[Form, int]
"""Replicas of each form."""

NONE: Counts = {}

Cost = Callable[[Layout], float]
"""Of a layout, infinite where it is impossible."""


def families(forms: Forms, cost: Cost) -> Iterator[Layout]:
    """Each class alone, then the best of several together.

    Args:
      forms: of the cluster.
      cost: what the search has of a layout once it was yielded.
    """
    best: list[list[Counts]] = []
    for at, cls in enumerate(forms.classes):
        found: list[tuple[float, Counts]] = []
        for form in _sizes(forms, at):
            counts: Counts = {form: cls.count // form_size(form)}
            layout = forms.place(counts)
            if layout:
                yield layout
                found.append((cost(layout), counts))
        found.sort(key=lambda each: each[0])
        best.append([NONE, *(counts for _, counts in found[:KEPT])])
    several = (x for x in itertools.product(*best) if sum(map(bool, x)) > 1)
    for picked in itertools.islice(several, MOST_TOGETHER):
        layout = forms.place({form: n for x in picked for form, n in x.items()})
        if layout:
            yield layout


def spread(forms: Forms, most_layers: int) -> Iterator[Layout]:
    """Every replica on all classes, as even as devices allow."""
    classes = range(len(forms.classes))
    orders = [tuple(classes), tuple(reversed(classes))]
    if len(classes) <= MOST_ORDERED:
        orders = [*itertools.permutations(classes)]
    counts = [cls.count for cls in forms.classes]
    for replicas in scales(min(counts)) if len(counts) > 1 else ():
        shares = _shares(counts, replicas)
        for order, lanes in itertools.product(orders, (False, True)):
            made: Counts = {}
            for share in shares:
                form: Form = ()
                for at in order:
                    per_block = forms.classes[at].per_block
                    width = math.gcd(share[at], per_block) if lanes else 1
                    slot = Slot(at=at, devices=width, tensor=1)
                    form += (slot,) * (share[at] // width)
                made[form] = made.get(form, 0) + 1
            if max(map(len, made)) <= most_layers:
                layout = forms.place(made)
                if layout:
                    yield layout


def _shares(counts: Sequence[int], replicas: int) -> list[list[int]]:
    """Devices of each class for each replica; what is over goes to the smallest."""
    shares = [[count // replicas for count in counts] for _ in range(replicas)]
    for at, count in enumerate(counts):
        smallest = sorted(range(replicas), key=lambda r: sum(shares[r]))
        for r in smallest[: count % replicas]:
            shares[r][at] += 1
    return shares


def _sizes(forms: Forms, at: int) -> Iterator[Form]:
    """Forms of one class by size, of each those that are fastest if always busy."""
    sizes: dict[int, dict[int, Form]] = {}
    for form in sorted(forms.pure(at), key=lambda form: -forms.ideal(form)):
        if form_size(form) <= forms.classes[at].count:
            by_width = sizes.setdefault(form_size(form), {})
            if len(by_width) < WIDTHS:
                by_width.setdefault(form[0].devices, form)
    for size in sorted(sizes):
        yield from sizes[size].values()
