"""Helpers of error texts."""

import pytest

from hexijax.errors import UserError, did_you_mean


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("stpes", ["steps", "seed"], " Did you mean 'steps'?"),
        ("h100-80g", ["H100-80G", "A100-80G"], " Did you mean 'H100-80G'?"),
        ("quantum", ["H100", "A100"], ""),
        ("anything", [], ""),
    ],
)
def test_the_nearest_choice_is_offered_if_it_is_near(name, choices, hint):
    assert did_you_mean(name, choices) == hint


def test_user_errors_are_value_errors():
    assert issubclass(UserError, ValueError)
