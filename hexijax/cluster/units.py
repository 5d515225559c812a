"""The quantities of cluster documents: units of files, and what is absurd in each.

Numbers are read as decimals, so that 0.7 GB/s is 700,000,000 bytes per second to the
last bit and every value survives being written and read again.
"""

import dataclasses
from decimal import Decimal

from hexijax.cluster.errors import Form, Place, as_decimal, shown


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A number with a unit and a range beyond which it must be a slip."""

    unit: str
    """Unit in files; empty for a plain number."""

    low: Decimal
    """Least value, in ``unit``."""

    high: Decimal
    """Greatest value, in ``unit``."""

    scale: Decimal = Decimal(1)
    """SI units in one ``unit``."""

    si_unit: str = ""
    """Unit in data."""

    whole: bool = False
    """The SI value is an int."""

    hint: str = ""
    """A way out, closing every message."""

    def read(self, raw: object, place: Place) -> int | float:
        """The SI value."""
        scale, unit = self._scale_and_unit(place.form)
        number = as_decimal(raw)
        if number is None or not number.is_finite():
            kind = f"number of {unit}" if unit else "number"
            place.fail(f"is {shown(raw)}; it must be a {kind}.{self.hint}")
        low, high = self.low * self.scale / scale, self.high * self.scale / scale
        if not low <= number <= high:
            place.fail(
                f"is {shown(raw)}; it must be from {shown(low)} to {shown(high)}"
                f"{' ' if unit else ''}{unit}.{self.hint}"
            )
        if not self.whole:
            return float(number * scale)
        if scale == 1 and number != number.to_integral_value():
            place.fail(f"is {shown(raw)}; it must be a whole number.{self.hint}")
        return round(number * scale)

    def write(self, value: int | float, form: Form) -> object:
        """The number in the form's unit."""
        if form is Form.DATA:
            return value
        number = Decimal(repr(value)) / self.scale
        return int(number) if number == number.to_integral_value() else number

    def _scale_and_unit(self, form: Form) -> tuple[Decimal, str]:
        """SI units per number of the form, and what to call them."""
        if form is Form.DATA:
            return Decimal(1), self.si_unit or self.unit
        return self.scale, self.unit


MEMORY = Quantity(
    unit="GiB",
    si_unit="bytes",
    scale=Decimal(2**30),
    low=Decimal("0.01"),
    high=Decimal(65_536),
    whole=True,
    hint=" One GiB is 1024 MiB, 2**30 bytes.",
)
MEMORY_OR_NONE = dataclasses.replace(MEMORY, low=Decimal(0))
BANDWIDTH = Quantity(
    unit="GB/s",
    si_unit="bytes/s",
    scale=Decimal(10**9),
    low=Decimal("1e-6"),
    high=Decimal(100_000),
    hint=" GB/s counts 1e9 bytes, one way: 10 Gbit/s is 1.25 GB/s.",
)
UPDATES = Quantity(
    unit="million parameters/s",
    si_unit="parameters/s",
    scale=Decimal(10**6),
    low=Decimal("1e-3"),
    high=Decimal(100_000_000),
    hint=" Count what all cores of the node update together.",
)
LATENCY = Quantity(
    unit="us",
    si_unit="s",
    scale=Decimal("1e-6"),
    low=Decimal(0),
    high=Decimal(10_000_000),
    hint=" One second is 1,000,000 us.",
)
MESSAGE_TIME = dataclasses.replace(LATENCY, high=Decimal(3_600_000_000))
"""Of one message: 1 GiB over a 10 Mbit/s line takes a quarter of an hour."""
PEAK = Quantity(
    unit="TFLOP/s",
    si_unit="FLOP/s",
    scale=Decimal(10**12),
    low=Decimal("1e-6"),
    high=Decimal(1_000_000),
    hint=" Give the dense peak of one device in units of 1e12 per second.",
)
CLOCK = Quantity(
    unit="MHz",
    si_unit="Hz",
    scale=Decimal(10**6),
    low=Decimal(1),
    high=Decimal(100_000),
)
POWER = Quantity(unit="W", low=Decimal("0.1"), high=Decimal(100_000))
PRICE = Quantity(unit="USD per hour", low=Decimal(0), high=Decimal(100_000))
SPEED = Quantity(unit="", low=Decimal("1e-6"), high=Decimal(1_000_000))
MESSAGE = Quantity(unit="bytes", low=Decimal(1), high=Decimal(2**50), whole=True)


def whole(*, most: int, least: int = 1, hint: str = "") -> Quantity:
    """A count of things."""
    return Quantity(
        unit="", low=Decimal(least), high=Decimal(most), whole=True, hint=hint
    )
