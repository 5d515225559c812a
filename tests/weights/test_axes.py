"""A box of what is turned, split or merged is made of the box that is asked for it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.weights.axes import Axes
from hexijax.weights.source import index, whole

TEXTS = [
    "o i -> i o",
    "d c p q -> (p q c) d",
    "one s d -> (one s) d",
    "(a b) c -> b (c a)",
    "a (b c) d -> (d c) (a b)",
    "a -> a",
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Axes, tuple[tuple[int, int], ...]]:
    text = draw(st.sampled_from(TEXTS))
    letters = {x for dim in Axes(text).sides[0] for x in dim}
    axes = Axes(text, {x: draw(st.integers(1, 5)) for x in sorted(letters)})
    box = []
    for rows in axes.shape(right=True):
        start = draw(st.integers(0, rows - 1))
        box.append((start, draw(st.integers(start + 1, rows))))
    return axes, tuple(box)


@given(cases())
def test_a_box_of_the_right_side_follows_from_the_box_that_it_needs(case):
    axes, box = case
    left = axes.shape(right=False)
    array = np.arange(math.prod(left)).reshape(left)
    turned = axes.apply(array, whole(axes.shape(right=True)))
    assert turned.shape == axes.shape(right=True)
    got = axes.apply(array[index(axes.needed(box))], box)
    np.testing.assert_array_equal(got, turned[index(box)])
    # And the way back is the way back.
    np.testing.assert_array_equal(axes.back.apply(turned, whole(left)), array)


def test_only_what_is_turned_is_read():
    assert Axes("o i -> i o", {"o": 6, "i": 4}).needed(((1, 2), (0, 5))) == (
        (0, 5),
        (1, 2),
    )
    patches = Axes("d c p q -> (p q c) d", {"d": 8, "c": 3, "p": 4, "q": 4})
    # The fourth pixel of the first line of a patch; then it and half of the next line.
    assert patches.needed(((9, 12), (2, 3))) == ((2, 3), (0, 3), (0, 1), (3, 4))
    assert patches.needed(((9, 18), (2, 3))) == ((2, 3), (0, 3), (0, 2), (0, 4))


def test_sizes_follow_from_a_shape_or_the_shape_is_refused():
    axes = Axes("d c p q -> (p q c) d", {"c": 3}, ("p", "q"))
    assert axes.sized((48, 8), right=True).shape(right=False) == (8, 3, 4, 4)
    with pytest.raises(ValueError, match="do not divide a dim of 49"):
        axes.sized((49, 8), right=True)
    with pytest.raises(ValueError, match="are of 2 dims there, the array has 1"):
        axes.sized((48,), right=True)
    with pytest.raises(ValueError, match="each axis stands once on each side"):
        Axes("a b -> a")
