"""Layouts whose replicas are few and alike, class by class.

    Forms -> families -> (Layout, ...), to be scored as they come

Where links are slow, sums and activations cost more than compute, and what the exact
program over paces takes for best is far from it: how many replicas there are, how many
nodes each spans and which devices stay out decides. So each class alone is cut into
replicas of every size, and the best of each class are put together.
"""

import itertools
from collections.abc import Callable, Iterator

from hexijax.planner.forms import Form, Forms, form_size
from hexijax.planner.mesh import Layout

WIDTHS = 3
"""Forms of one size that are tried: meshes of one device, of some, of a node."""

KEPT = 2
"""Of each class, put together with those of others."""

MOST_TOGETHER = 48
"""Of the layouts of several classes."""

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
