"""Finds the layers: where the flat program is cut, and what each piece is called.

    parameter paths (`blocks/3`, `h_3`, rows of a scan), or markers -> (Cut, ...)

A cut stands between the last use of one layer's own parameters and the first use of the
next one's, where the fewest live bytes cross; of equals, the earliest. What the user
marks by ``checkpoint_name(x, "layer:NAME")`` overrules everything else.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hexijax.layers.equations import Equations
from hexijax.layers.places import place_of

MARKER = "layer:"
"""Prefix of a ``jax.ad_checkpoint.checkpoint_name`` that starts a layer."""

EMBED, HEAD, WHOLE = "embed", "head", "model"


_WHOLE_PART = 0.8
"""Of a block's parameters, in the blocks within it that may take its place: two norms,
`ln_1` and `ln_2`, or two attentions are not all that a block is made of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The start of a layer."""

    name: str
    """Of the layer that starts here."""

    start: int
    """Index of its first equation."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """The equations between the first and the last use of a layer's own parameters."""

    name: str
    first: int
    last: int


def find_cuts(equations: Equations) -> tuple[tuple[Cut, ...], tuple[str, ...]]:
    """The layers in order, the first at 0, and notes for people."""
    marked = list(_markers(equations))
    notes = tuple(_hidden_markers(equations))
    if marked:
        return _distinct(_from_markers(equations, marked)), notes
    blocks = _choose_level(equations)
    if not blocks:
        why = _interleaved(equations) or (
            "No numbered blocks (blocks/0, h_0, a scan over stacked layers) were found "
            "among the parameters"
        )
        note = (
            f"{why}: the model is one layer. Mark where layers start "
            'with jax.ad_checkpoint.checkpoint_name(x, "layer:NAME").'
        )
        return (Cut(WHOLE, 0),), (*notes, note)
    return _distinct(_from_blocks(equations, blocks)), notes


def _markers(equations: Equations) -> Iterator[Cut]:
    for i in equations.live:
        eqn = equations.eqns[i]
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(MARKER):
            yield Cut(eqn.params["name"].removeprefix(MARKER), i)


def _hidden_markers(equations: Equations) -> Iterator[str]:
    """Markers where nothing can be cut: inside a loop, or what is computed anew."""
    for eqn in equations.eqns:
        inside = sorted(
            {
                name.removeprefix(MARKER)
                for name in _names_within(eqn)
                if name.startswith(MARKER)
            }
        )
        if inside:
            yield (
                f"The marker {', '.join(inside)} stands inside a "
                f"`{eqn.primitive.name}` at {place_of(eqn, equations.eqns)}, which is "
                "never cut apart: it starts no layer. Put it before or after."
            )


def _names_within(eqn: Any) -> Iterator[str]:
    """Names that values have been given in the programs that an equation holds."""
    for value in eqn.params.values():
        held = value if isinstance(value, (list, tuple)) else [value]
        for program in held:
            jaxpr = getattr(program, "jaxpr", program)
            for inner in getattr(jaxpr, "eqns", ()):
                if inner.primitive.name == "name":
                    yield inner.params["name"]
                yield from _names_within(inner)


def _interleaved(equations: Equations) -> str | None:
    """Which blocks are used in turns, so that none ends before the next begins."""
    blocks = _blocks(equations, 0)
    for this, following in itertools.pairwise(blocks):
        if this.last > following.first:
            again, begins = (
                place_of(equations.eqns[i], equations.eqns)
                for i in (this.last, following.first)
            )
            return (
                f"{this.name} is used again, at {again}, after {following.name} has "
                f"begun, at {begins}, so that no cut parts them"
            )
    return None


def _from_markers(equations: Equations, marked: list[Cut]) -> list[Cut]:
    if not any(i < marked[0].start for i in equations.live):
        return [Cut(marked[0].name, 0), *marked[1:]]
    return [Cut(EMBED, 0), *marked]


def _from_blocks(equations: Equations, blocks: Sequence[_Block]) -> list[Cut]:
    inside = {v for v, path in equations.paths.items() if _key(path, blocks)}
    outside = [i for v, at in equations.uses.items() if v not in inside for i in at]
    cuts = [Cut(blocks[0].name, 0)]
    before = [i for i in outside if i < blocks[0].first]
    if before:
        start = _narrowest(equations, max(before) + 1, blocks[0].first)
        cuts = [Cut(EMBED, 0), Cut(blocks[0].name, start)]
    for this, following in itertools.pairwise(blocks):
        start = _narrowest(equations, this.last + 1, following.first)
        cuts.append(Cut(following.name, max(start, cuts[-1].start + 1)))
    after = [i for i in outside if i > blocks[-1].last]
    if after:
        start = _narrowest(equations, blocks[-1].last + 1, min(after))
        cuts.append(Cut(HEAD, start))
    return cuts


def _narrowest(equations: Equations, low: int, high: int) -> int:
    """The place in [low, high] that the fewest bytes cross, the earliest of equals."""
    if low > high:
        return high
    crossing = equations.crossing_bytes
    return min(range(low, high + 1), key=lambda k: (crossing[k], k))


def _distinct(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """The same cuts with a number behind names that come more than once."""
    names = [cut.name for cut in cuts]
    seen: dict[str, int] = {}
    unique = []
    for cut in cuts:
        if names.count(cut.name) > 1:
            seen[cut.name] = seen.get(cut.name, -1) + 1
            cut = Cut(f"{cut.name}/{seen[cut.name]}", cut.start)
        unique.append(cut)
    return tuple(unique)


# Levels: a path may hold several indices (stages/0/blocks/1/experts/2).


def _indices(path: Sequence[str]) -> list[int]:
    """Positions in a path of components that end a numbered prefix."""
    return [i for i, part in enumerate(path[:-1]) if _NUMBERED.fullmatch(part)]


_NUMBERED = re.compile(r"\d+|.*_\d+|[A-Za-z_]*[A-Za-z]\d+")


def _prefix(path: Sequence[str], level: int) -> str | None:
    at = _indices(path)
    return "/".join(path[: at[level] + 1]) if level < len(at) else None


def _key(path: Sequence[str], blocks: Sequence[_Block]) -> str | None:
    """The block a parameter belongs to."""
    names = {block.name for block in blocks}
    parts = range(len(path), 0, -1)
    return next((k for n in parts if (k := "/".join(path[:n])) in names), None)


def _choose_level(equations: Equations) -> list[_Block]:
    """The innermost level whose borders are no wider than those of the level around."""
    chosen: list[_Block] = []
    for level in range(
        max(map(len, map(_indices, equations.paths.values())), default=0)
    ):
        blocks = _blocks(equations, level)
        if not blocks or not _in_order(blocks):
            break
        if chosen:
            blocks = _refine(equations, chosen, blocks)
        chosen = blocks
    return chosen


def _blocks(equations: Equations, level: int) -> list[_Block]:
    members: dict[str, list[Any]] = {}
    for v, path in equations.paths.items():
        prefix = _prefix(path, level)
        if prefix is not None and v in equations.uses:
            members.setdefault(prefix, []).append(v)
    depth = {
        k: max(len(equations.paths[v]) - k.count("/") - 1 for v in vs)
        for k, vs in members.items()
    }
    series: dict[str, list[str]] = {}
    for prefix in members:
        series.setdefault(re.sub(r"\d+$", "", prefix), []).append(prefix)
    # Linen numbers every submodule (Dense_0 beside Block_0): where there are modules of
    # modules, those are the layers; a lone Dense_0 never is.
    nested = any(d > 1 for d in depth.values())
    kept = [
        prefix
        for names in series.values()
        for prefix in names
        if (depth[prefix] > 1 or not nested)
        and (len(names) > 1 or depth[prefix] > 1 or prefix.endswith("/0"))
    ]
    return _spans(equations, {k: members[k] for k in kept})


def _spans(equations: Equations, members: dict[str, list[Any]]) -> list[_Block]:
    uses = equations.uses
    spans = [
        _Block(k, min(uses[v][0] for v in vs), max(uses[v][-1] for v in vs))
        for k, vs in members.items()
    ]
    return sorted(spans, key=lambda block: block.first)


def _in_order(blocks: Sequence[_Block]) -> bool:
    """Whether each block is done before the next one starts."""
    pairs = itertools.pairwise(blocks)
    return all(a.last <= b.first for a, b in pairs)


def _refine(
    equations: Equations, outer: Sequence[_Block], inner: Sequence[_Block]
) -> list[_Block]:
    """``outer`` with each block replaced by its inner ones where those fit."""
    crossing = equations.crossing_bytes
    cuts = [cut.start for cut in _from_blocks(equations, outer)]
    refined: list[_Block] = []
    for block in outer:
        parts = [b for b in inner if b.name.startswith(block.name + "/")]
        around = [crossing[c] for c in cuts[1:]]
        borders = [
            crossing[_narrowest(equations, a.last + 1, b.first)]
            for a, b in itertools.pairwise(parts)
        ]
        narrow = len(parts) > 1 and max(borders) <= max(around, default=max(borders))
        whole = _size(equations, parts) >= _WHOLE_PART * _size(equations, [block])
        fits = narrow and whole
        refined += parts if fits else [block]
    return refined


def _size(equations: Equations, blocks: Sequence[_Block]) -> int:
    """Elements of the parameters in some blocks."""
    return sum(v.aval.size for v, path in equations.paths.items() if _key(path, blocks))
