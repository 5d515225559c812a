"""Random collectives, each held against NumPy."""

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.runtime.carrying import Carrier, settled
from hexijax.runtime.communicator import Communicator

OPERATIONS = ("send", "broadcast", "all_gather", "all_reduce", "reduce_scatter")
TAILS = [(), (3,), (2, 5)]
FORMS = 6
"""Of arrays, however many rounds."""

DTYPES = ["float32", "bfloat16", "int32"]


class Round:
    """One collective: what all members give, and what each must get."""

    def __init__(
        self,
        rng: random.Random,
        members: int,
        most: int,
        operation: str,
        dtypes: Sequence[str],
        *,
        exact: bool = False,
    ):
        """``most``: rows that a member has, at most; ``exact``: so many or one less,
        of one number each."""
        self.operation, self.dtypes = operation, dtypes
        numbers = np.random.default_rng(rng.getrandbits(32))
        few = random.Random(rng.randrange(FORMS))  # each form is compiled for
        tail = few.choice(TAILS)
        self.rows = [few.choice([0, 1, few.randint(0, most)]) for _ in range(members)]
        if exact:
            tail, self.rows = (), [max(0, most - i % 2) for i in range(members)]
        whole = sum(self.rows)
        self.source, self.target = rng.randrange(members), rng.randrange(members)
        each = self.rows if operation == "all_gather" else [whole] * members
        # Whole numbers: any order of addition gives the same, in any dtype.
        self.given = [
            numbers.integers(-3, 4, (n, *tail)).astype(jnp.dtype(d))
            for n, d in zip(each, dtypes, strict=True)
        ]

    def want(self, member: int) -> np.ndarray | None:
        """What a member must get; None: nothing."""
        given, starts = self.given, np.cumsum([0, *self.rows])
        match self.operation:
            case "send":
                found = given[self.source] if member == self.target else None
            case "broadcast":
                found = given[self.source]
            case "all_gather":
                found = np.concatenate([x.astype("float32") for x in given])
            case "all_reduce":
                found = sum(x.astype("float32") for x in given)
            case _:
                total = sum(x.astype("float32") for x in given)
                found = total[starts[member] : starts[member + 1]]
        return found

    def run(self, group: Communicator, devices: Sequence[jax.Device]) -> None:
        """On this island's members."""
        values: list[Any] = [
            jax.device_put(x, devices[i])
            if i in group.here
            else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for i, x in enumerate(self.given)
        ]
        match self.operation:
            case "send":
                got = [None] * len(values)
                sent = group.send(values[self.source], self.source, self.target)
                got[self.target] = sent
            case "broadcast":
                got = group.broadcast(values[self.source], self.source)
            case "all_gather":
                got = group.all_gather(values)
            case "all_reduce":
                got = group.all_reduce(values)
            case _:
                got = group.reduce_scatter(values, self.rows)
        for i in group.here:
            want, mine = self.want(i), settled(got[i])
            if want is None:
                assert mine is None, self.operation
                continue
            assert mine.devices() == {devices[i]}, (self.operation, i)
            assert mine.dtype == jnp.dtype(self.dtypes[i]), (self.operation, i)
            np.testing.assert_array_equal(
                np.asarray(mine).astype("float32"),
                want.astype("float32"),
                err_msg=f"{self.operation} on member {i}",
            )


def rounds(
    carrier: Carrier,
    devices: Sequence[jax.Device],
    *,
    seed: int,
    count: int,
    most: int = 6,
    mixed: bool = False,
    dtype: str = "",
) -> None:
    """So many over one group, of a ``dtype`` or any; ``mixed``: of several."""
    rng = random.Random(seed)
    one = dtype or rng.choice(DTYPES)
    dtypes = [rng.choice(["float32", "bfloat16"]) for _ in devices]
    given = dtypes if mixed else [one] * len(devices)
    group = Communicator(
        devices, carrier, dtypes=given if mixed else None, name=f"group {seed}"
    )
    for n in range(count):
        operation = OPERATIONS[n % len(OPERATIONS)]
        made = Round(rng, len(devices), most, operation, given)
        if group.here:
            made.run(group, devices)
