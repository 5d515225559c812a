"""What every batch of a job looks like: names, shapes and dtypes, and how many samples.

    first batch -> BatchForm.of -> .taken(any batch) -> NumPy arrays, or an error

Programs are compiled for one form, and the sample map covers a batch exactly: one that
is too long would lose samples silently, so nothing else is taken.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hexijax.errors import UserError, did_you_mean
from hexijax.layers.chain import Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchForm:
    """The form of a global batch."""

    size: int
    """Samples: dim 0 of every array."""

    arrays: Mapping[str, Array]
    """One sample of each array."""

    @classmethod
    def of(cls, batch: Any) -> "BatchForm":
        """The form of a first batch.

        Raises:
          UserError: it is no dict of arrays of numbers with one dim 0.
        """
        arrays = {name: _array(name, x, "The batch") for name, x in _items(batch)}
        sizes = {name: len(x) for name, x in arrays.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            counts = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise UserError(
                f"The batch's arrays have these numbers of samples: {counts or 'none'}."
                " Dim 0 of every array is the sample, one number for all and at least "
                "1. What belongs to no sample is closed over by the loss."
            )
        return cls(
            size=next(iter(sizes.values())),
            arrays={
                name: Array(shape=x.shape[1:], dtype=x.dtype.name)
                for name, x in arrays.items()
            },
        )

    @property
    def words(self) -> dict[str, str]:
        """Each array's form as text, for people and for files."""
        return {k: _word(x.dtype, x.shape) for k, x in sorted(self.arrays.items())}

    @classmethod
    def from_words(cls, words: Mapping[str, str], size: int) -> "BatchForm":
        """The form whose ``words`` these are."""
        arrays: dict[str, Array] = {}
        for name, word in words.items():
            dtype, _, dims = word.rstrip("]").partition("[")
            shape = tuple(int(dim) for dim in dims.split(",") if dim)
            arrays[name] = Array(shape=shape, dtype=dtype)
        return cls(size=size, arrays=arrays)

    def example(self, size: int = 1) -> dict[str, np.ndarray]:
        """A batch of zeros in this form."""
        return {
            name: np.zeros((size, *x.shape), x.dtype) for name, x in self.arrays.items()
        }

    def taken(
        self, batch: Any, what: str, *, short: bool = False
    ) -> dict[str, np.ndarray]:
        """The arrays of a batch, in the dtypes that JAX gives them.

        Args:
          batch: arrays by name.
          what: the batch is called in messages.
          short: fewer samples will do.

        Raises:
          UserError: it has another form.
        """
        given = dict(_items(batch))
        if given.keys() != self.arrays.keys():
            raise UserError(self._names(given, what))
        arrays = {name: _array(name, given[name], what) for name in self.arrays}
        for name, x in arrays.items():
            want = self.arrays[name]
            if (x.shape[1:], x.dtype.name) != (want.shape, want.dtype):
                raise UserError(
                    f"{what}: a sample of {name!r} is "
                    f"{_word(x.dtype.name, x.shape[1:])}, and the first batch's was "
                    f"{_word(want.dtype, want.shape)}, which programs are compiled "
                    "for. Pad or cast it, or make a job of its own for such batches."
                )
            _check_rows(name, x, want, what)
            if len(x) == self.size or (short and 0 < len(x) < self.size):
                continue
            rule = (
                "an evaluation's batch may be shorter, and not empty"
                if short
                else "a step takes exactly that many under every plan. Leave a short "
                "last batch out, or fill it up with samples of weight 0"
            )
            raise UserError(
                f"{what}: {name!r} has {len(x)} samples, and the batch size is "
                f"{self.size}: {rule}."
            )
        if len({len(x) for x in arrays.values()}) > 1:
            counts = ", ".join(f"{name} {len(x)}" for name, x in arrays.items())
            raise UserError(
                f"{what}: its arrays have unlike numbers of samples: {counts}."
            )
        return arrays

    def _names(self, given: Mapping[str, Any], what: str) -> str:
        missing = sorted(self.arrays.keys() - given.keys())
        extra = sorted(given.keys() - self.arrays.keys())
        says = [f"{', '.join(missing)} missing"] * bool(missing)
        says += [f"{', '.join(extra)} not known"] * bool(extra)
        hint = did_you_mean(extra[0], missing) if extra and missing else ""
        return (
            f"{what} has the arrays {', '.join(sorted(given)) or 'none'}, and the "
            f"first batch had {', '.join(sorted(self.arrays))}: {'; '.join(says)}."
            f"{hint} Give every batch the same names."
        )


def _items(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        raise UserError(
            f"A batch is a dict of arrays by name; a {type(batch).__name__} was given."
            ' Name what the loss reads, as {"x": x, "y": y}.'
        )
    return batch.items()


def _array(name: str, given: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(given)
    except ValueError as error:  # lists of unlike lengths
        raise UserError(f"{what}: {name!r} is no array: {error}") from error
    numeric = array.dtype.kind in "biufc" or jax.dtypes.issubdtype(
        array.dtype, np.number
    )
    if not numeric or array.ndim == 0:
        raise UserError(
            f"{what}: {name!r} is {_word(array.dtype.name, array.shape)}; every array "
            "holds numbers, and its dim 0 is the sample. Leave out what the loss does "
            "not read, as text and names."
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _check_rows(name: str, x: np.ndarray, want: Array, what: str) -> None:
    """JAX would take the last row, or NaN, for a row that is not there."""
    if want.rows is None or not x.size:
        return
    most, least = int(x.max()), int(x.min())
    if most < want.rows and least >= -want.rows:
        return
    wrong = most if most >= want.rows else least
    sample = int(np.argwhere(x == wrong)[0][0])
    raise UserError(
        f"{what}: {name!r} has the number {wrong:,} in sample {sample}, and the "
        f"model's {want.picks} has {want.rows:,} rows, numbered from 0. Where these "
        "are tokens, a tokenizer of another vocabulary made them: name the model's "
        "own, or give the model as many rows."
    )


def _word(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
