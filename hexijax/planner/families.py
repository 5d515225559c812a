"""Layouts whose replicas are few and alike: what sums and activations cost least in.

    Forms -> families, families_of_kinds, spread, in_line -> (Layout, ...)

They are scored as they come.

Where links are slow, sums and activations cost more than compute, and what the exact
program over paces takes for best is far from it: how many replicas there are, how many
nodes each spans and which devices stay out decides. The two ways of HexiScale's
grouping: fast links inside pipelines, when each class alone is cut into replicas of
every size and the best of each are put together; or fast links between them, when every
replica has a share of every class, in one order, and sums stay in the node. And between
the two: pipelines of one length, each on one kind, whose nodes may be of unlike size.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from hexijax.planner.forms import Form, Forms, Slot, form_size, scales
from hexijax.planner.mesh import Layout

WIDTHS = 3
"""Forms of one size that are tried: meshes of one device, of some, of a node."""

KEPT = 2
"""Of each class, put together with those of others."""

MOST_TOGETHER = 64
"""Of the layouts of several classes."""

FEW_CLASSES = 3
"""Classes of which all ways are tried."""

MOST_PAIRS, MOST_THREES = 8, 12
"""Of more classes. Of a pair all ways are tried: what is best beside another class need
not be what is best alone."""

PATIENCE, EQUAL = 2, 1 + 1e-6
"""Numbers of replicas or of kinds that are worse before more are given up; bounds are
often equal, and what is not scored has no more than a bound."""

MOST_UNLIKE, FEW = 2, 64
"""Kinds whose stages may be of unlike width, and devices up to which they are tried."""

MOST_ORDERED = 3
"""Kinds whose every order in a pipeline is tried."""

EVERY_LENGTH = 8
"""Stages of a pipeline up to which every number is tried."""

Counts = collections.Counter[Form]
"""Replicas of each form."""

Priced = tuple[float, Counts]

NONE: Counts = collections.Counter()

Cost = Callable[[Layout], float]
"""Of a layout, infinite where it is impossible."""


def families(forms: Forms, cost: Cost) -> Iterator[Layout]:
    """Each class alone, then the best of several together.

    Args:
      forms: of the cluster.
      cost: what the search has of a layout once it was yielded.
    """
    best: list[list[Priced]] = []
    for at, cls in enumerate(forms.classes):
        found: list[Priced] = []
        for form in _sizes(forms, at):
            size = form_size(form)
            # Where links are slow what one node holds may do best by itself.
            in_node = max(1, cls.per_block // size)
            for count in dict.fromkeys((cls.count // size, in_node)):
                counts: Counts = collections.Counter({form: count})
                layout = forms.place(counts)
                if layout:
                    yield layout
                    if count == cls.count // size:
                        found.append((cost(layout), counts))
        best.append(sorted(found, key=_cheapest)[:KEPT])
    yield from _best_together(forms, best)


def families_of_kinds(
    forms: Forms, degrees: Sequence[int], most_layers: int, price: Cost
) -> Iterator[Layout]:
    """As above, of three kinds or more, or where a kind's nodes are of unlike size: of
    each its best number of pipelines and its smallest, since several kinds may have
    time for one sum only.

    Args:
      forms: of the cluster.
      degrees: tensor degrees of its stages.
      most_layers: of the model, which are most stages too.
      price: scores what was yielded, be it far behind: beside others it may be of use.
    """
    if len(forms.kinds) < FEW_CLASSES and len(forms.kinds) == len(forms.classes):
        return
    best: list[list[Priced]] = []
    for ats in forms.kinds:
        of_replicas = functools.partial(_cuts, forms, ats, degrees, most_layers)
        tried: list[Priced] = []
        every = scales(sum(forms.classes[at].count for at in ats))
        yield from _while_it_pays(forms, every, of_replicas, most_layers, price, tried)
        found = sorted((x for x in tried if x[0] < math.inf), key=_cheapest)
        fewest = sorted(found, key=lambda priced: priced[1].total())
        best.append([*found[:1], *(x for x in fewest[:1] if x is not found[0])])
    yield from _best_together(forms, best)


def _cheapest(priced: Priced) -> float:
    return priced[0]


def _best_together(forms: Forms, best: Sequence[Sequence[Priced]]) -> Iterator[Layout]:
    for picked in itertools.islice(_together(best), MOST_TOGETHER):
        layout = forms.place(sum(picked, NONE))
        if layout:
            yield layout


def _together(best: Sequence[Sequence[Priced]]) -> Iterator[Sequence[Counts]]:
    """Of several classes one each: all ways where classes are few. Of more the fastest
    together, then pairs and threes of them, by what they would do did sums cost
    nothing."""
    if len(best) <= FEW_CLASSES:
        ways = [[NONE, *(counts for _, counts in found)] for found in best]
        yield from (x for x in itertools.product(*ways) if sum(map(bool, x)) > 1)
        return
    ranked = sorted((found for found in best if found), key=lambda x: x[0][0])
    for number in range(2, len(ranked) + 1):
        yield [found[0][1] for found in ranked[:number]]
    for number, most in ((2, MOST_PAIRS), (3, MOST_THREES)):
        sets = [*itertools.combinations(ranked, number)]
        sets.sort(key=lambda some: -sum(1 / found[0][0] for found in some))
        for some in sets[:most]:
            ways = [found if number == 2 else found[:1] for found in some]
            for picked in itertools.product(*ways):
                yield [counts for _, counts in picked]


def spread(
    forms: Forms, degrees: Sequence[int], most_layers: int, cost: Cost
) -> Iterator[Layout]:
    """Every replica on all kinds, as even as can be; then without the slowest of them.

    A chain of one layer a stage goes at the pace of its slowest card, so a kind may
    hold up more than it computes: kinds stay out, the slowest first, while that pays.

    Args:
      forms: of the cluster.
      degrees: tensor degrees of its stages.
      most_layers: of the model, which are most stages too.
      cost: as above.
    """
    return _without_slowest(
        forms, lambda used: _spread(forms, used, degrees, most_layers, cost), cost, 2
    )


def in_line(
    forms: Forms, degrees: Sequence[int], most_layers: int, cost: Cost
) -> Iterator[Layout]:
    """Pipelines of one length or little more, each on one kind; then as above.

    What joins several pipelines at a time, of all kinds, is no neighbour of theirs.
    """
    return _without_slowest(
        forms, lambda used: _in_line(forms, used, degrees, most_layers, cost), cost, 1
    )


def _without_slowest(
    forms: Forms,
    layouts: Callable[[Sequence[tuple[int, ...]]], Iterable[Layout]],
    cost: Cost,
    fewest: int,
) -> Iterator[Layout]:
    """Of all kinds, then without the slowest of them, while that pays."""
    kinds = sorted(forms.kinds, key=lambda ats: -_speed(forms, ats))
    best, worse = math.inf, 0
    while len(kinds) >= fewest and worse < PATIENCE:
        here = math.inf
        for layout in layouts([ats for ats in forms.kinds if ats in kinds]):
            yield layout
            here = min(here, cost(layout))
        # Until something fits, slow ones may be what is in the way.
        worse = worse + 1 if here >= best < math.inf else 0
        best = min(best, here)
        kinds.pop()


def _in_line(
    forms: Forms,
    kinds: Sequence[tuple[int, ...]],
    degrees: Sequence[int],
    most_layers: int,
    cost: Cost,
) -> Iterator[Layout]:
    """On some kinds; longer while it pays."""
    counts = {ats: sum(forms.classes[at].count for at in ats) for ats in kinds}
    lengths = [n for n in scales(max(counts.values())) if n > EVERY_LENGTH]

    def of_length(length: int) -> Iterator[list[Form]]:
        for degree in degrees:
            yield [
                form
                for ats in kinds
                for form in _lines(
                    forms, ats, max(1, counts[ats] // (length * degree)), degree
                )
            ]

    every = [*range(2, EVERY_LENGTH + 1), *lengths]
    return _while_it_pays(forms, every, of_length, most_layers, cost)


def _while_it_pays(
    forms: Forms,
    numbers: Iterable[int],
    replicas: Callable[[int], Iterable[list[Form]]],
    most_layers: int,
    cost: Cost,
    found: list[Priced] | None = None,
) -> Iterator[Layout]:
    """Layouts for each number in turn, until several in a row are worse. ``found`` gets
    what they cost."""
    best, worse = math.inf, 0
    for number in numbers:
        here = math.inf
        for made in replicas(number):
            layout = None
            if max(map(len, made)) <= most_layers:
                layout = forms.place(collections.Counter(made))
            if layout:
                yield layout
                now = cost(layout)
                here = min(here, now)
                if found is not None:
                    found.append((now, collections.Counter(made)))
        worse = worse + 1 if here > best * EQUAL else 0
        best = min(best, here)
        if worse >= PATIENCE:
            return


def _lines(
    forms: Forms, ats: tuple[int, ...], replicas: int, degree: int
) -> list[Form]:
    """A kind cut into pipelines."""
    shares = _shares(forms, [ats], replicas)
    return [_in_order(forms, ats, share, degree) for share in shares]


def _cuts(
    forms: Forms, ats: tuple[int, ...], degrees: Sequence[int], layers: int, number: int
) -> Iterator[list[Form]]:
    """A kind cut into a number of pipelines, whole and trimmed."""
    for degree in degrees:
        lines = _lines(forms, ats, number, degree)
        short = [_trimmed(form, layers) for form in lines]
        yield from (lines, short) if lines != short else (lines,)


def _trimmed(form: Form, layers: int) -> Form:
    """Without stages that the heaviest of them has no layer less for."""
    return form[: -(-layers // -(-layers // len(form)))]


def _in_order(
    forms: Forms, ats: Sequence[int], share: dict[int, int], degree: int | None
) -> Form:
    """A kind's part of a pipeline, class after class."""
    return tuple(
        slot for at in ats for slot in _run(forms, at, share.get(at, 0), degree)
    )


def _speed(forms: Forms, ats: Sequence[int]) -> float:
    """Samples a second of one device of a kind, were it always busy."""
    return forms.ideal((Slot(at=ats[0], devices=1, tensor=1),))


def _spread(
    forms: Forms,
    kinds: Sequence[tuple[int, ...]],
    degrees: Sequence[int],
    most_layers: int,
    cost: Cost,
) -> Iterator[Layout]:
    """On some kinds; more replicas while it pays."""
    orders = [kinds, kinds[::-1]]
    if len(kinds) <= MOST_ORDERED:
        orders = [*itertools.permutations(kinds)]
    ways = [dict.fromkeys(kinds, width) for width in (*degrees, None)]
    devices = sum(forms.classes[at].count for ats in kinds for at in ats)
    if len(kinds) <= MOST_UNLIKE and devices <= FEW:
        widths = itertools.product((*degrees, None), repeat=len(kinds))
        ways = [dict(zip(kinds, picked, strict=True)) for picked in widths]
    counts = [sum(forms.classes[at].count for at in ats) for ats in kinds]

    def of_replicas(replicas: int) -> Iterator[list[Form]]:
        shares = _shares(forms, kinds, replicas)
        for order, widths in itertools.product(orders, ways):
            yield [
                tuple(
                    slot
                    for ats in order
                    for slot in _in_order(forms, ats, share, widths[ats])
                )
                for share in shares
            ]

    every = scales(min(counts))
    return _while_it_pays(forms, every, of_replicas, most_layers, cost)


def _run(forms: Forms, at: int, share: int, degree: int | None) -> Form:
    """Stages of some devices of a class: one of a tensor degree each, or of lanes."""
    per_block = forms.classes[at].per_block
    if degree is None:
        width, tensor = math.gcd(share, per_block), 1
    else:
        width = tensor = degree if share % degree == per_block % degree == 0 else 1
    slot = Slot(at=at, devices=width, tensor=tensor)
    return (slot,) * (share // width) if share else ()


def _shares(
    forms: Forms, kinds: Sequence[tuple[int, ...]], replicas: int
) -> list[dict[int, int]]:
    """Devices of each class for each replica; what is over goes to the smallest."""
    shares: list[dict[int, int]] = [{} for _ in range(replicas)]
    for ats in kinds:
        devices = [at for at in ats for _ in range(forms.classes[at].count)]
        smallest = sorted(range(replicas), key=lambda r: sum(shares[r].values()))
        start = 0
        for i, r in enumerate(smallest):
            stop = start + len(devices) // replicas + (i < len(devices) % replicas)
            for at in devices[start:stop]:
                shares[r][at] = shares[r].get(at, 0) + 1
            start = stop
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
