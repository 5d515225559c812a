"""Do these weights fit this model? All that is wrong is told at once.

    names and shapes of a source, of a model -> fitted -> the same source, or an error

Nothing is read for it, except that a tensor which must equal another is compared.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from hexijax.weights.errors import WeightsError
from hexijax.weights.source import Box, Source, Tensor

VALUE = "/value"
"""What an ``nnx.State`` that was stored as it is appends to each path."""


class Renamed(Source):
    """A source whose tensors have other names."""

    def __init__(self, source: Source, name_of: Mapping[str, str]):
        self._source, self._name_of = source, name_of

    @property
    def where(self) -> str:
        """What it is read from."""
        return self._source.where

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by the new names."""
        given = self._source.tensors
        return {new: given[old] for new, old in self._name_of.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of the tensor behind the name."""
        return self._source.read(self._name_of[name], box)

    def windows(self, name: str) -> Sequence[Box]:
        """Those of the tensor behind the name."""
        return self._source.windows(self._name_of[name])


def fitted(source: Source, wanted: Mapping[str, Tensor]) -> Source:
    """See ``Source.fitted``: names that say the same path are the same."""
    plain = {name.replace(".", "/"): name for name in wanted}
    renamed: dict[str, str] = {}
    for name in source.tensors:
        path = name.replace(".", "/")
        if path not in plain and path.removesuffix(VALUE) in plain:
            path = path.removesuffix(VALUE)
        renamed[plain.get(path, name)] = name
    if all(new == old for new, old in renamed.items()):
        renamed_source = source
    else:
        renamed_source = Renamed(source, renamed)
    hint = _hint(source, wanted)
    check(source.where, renamed_source.tensors, wanted, way_out=hint)
    return renamed_source


def check(
    where: str,
    given: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    *,
    also: Mapping[str, str] | None = None,
    way_out: str = "",
) -> None:
    """Raises a ``WeightsError`` that names every tensor that does not fit.

    ``also``: the model's parameter behind a name of ``wanted``, where it is another.
    """
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted]
    wrong = [
        name
        for name in wanted
        if name in given
        and (
            given[name].shape != wanted[name].shape
            or _kind(given[name]) != _kind(wanted[name])
        )
    ]
    if not missing and not extra and not wrong:
        return

    def told(name: str) -> str:
        ours = (also or {}).get(name)
        return f"{name} (for {ours})" if ours else name

    lines = [
        f"The weights of {where} do not fit the model, which has {len(wanted)} of "
        f"them: {len(missing)} missing, {len(extra)} left over, {len(wrong)} of "
        "another shape or kind. Nothing was read."
    ]
    lines += [f"  missing    {told(name)} {wanted[name]}" for name in missing]
    lines += [f"  left over  {name} {given[name]}" for name in extra]
    lines += [
        f"  differs    {told(name)} is {given[name]}, the model's is {wanted[name]}"
        for name in wrong
    ]
    lines.append(way_out or "Build the model in the size that these weights have.")
    raise WeightsError("\n".join(lines))


def _kind(tensor: Tensor) -> str:
    """Floats may become other floats; nothing else changes its kind."""
    floating = tensor.dtype.kind == "f" or tensor.dtype.name.startswith(
        ("bfloat", "float")
    )
    return "float" if floating else tensor.dtype.name


def _hint(source: Source, wanted: Mapping[str, Tensor]) -> str:
    """A way out where names seem to lie elsewhere, or to be another library's."""
    given = [name.replace(".", "/") for name in source.tensors]
    for top in sorted({name.split("/")[0] for name in given}):
        found = {n.removeprefix(f"{top}/") for n in given if n.startswith(f"{top}/")}
        if top not in {n.split("/")[0] for n in wanted} and found >= {*wanted}:
            return f"All of them are there below {top!r}: say under={top!r}."
    from hexijax.weights.maps import families_of

    near = families_of(source.tensors)
    if near:
        return (
            f"The names are those of Hugging Face's {near[0]}: say "
            f"names={near[0]!r}, if the model is the one of that name."
        )
    return ""
