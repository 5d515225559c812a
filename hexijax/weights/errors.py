"""The error of this room."""

from hexijax.errors import UserError


class WeightsError(UserError):
    """Weights that are not there, cannot be read, or do not fit the model."""


class Damaged(WeightsError):
    """What was stored cannot be read, or is not what was written."""

    source: object = None
    """The source of slices that said so, where one did."""
