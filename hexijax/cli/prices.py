"""What an hour of each kind costs: a price file over the cluster's own figures.

    # prices.toml
    [usd_per_hour]
    h100-80g-sxm = 2.5
    rtx3090-24g = 0.25

A kind the file leaves out keeps the price of its profile, if it has one.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from hexijax.cluster import Cluster, Device, catalog, toml
from hexijax.errors import UserError, did_you_mean

TABLE = "usd_per_hour"


def read_prices(file: Path | None, cluster: Cluster) -> dict[str, float]:
    """Dollars an hour of one device, by kind, as far as they are known.

    Raises:
      UserError: the file is none of this form, or names a kind nobody knows.
    """
    prices = {
        profile.kind: profile.price_usd_per_hour
        for profile in (*catalog.profiles().values(), *cluster.profiles)
        if profile.price_usd_per_hour is not None
    }
    if file is None:
        return prices
    raw, name, _ = toml.load(file, called="prices")
    table = raw.get(TABLE)
    if set(raw) != {TABLE} or not isinstance(table, Mapping):
        raise UserError(
            f"{name}: a price file has one table [{TABLE}] of kinds and dollars an "
            f"hour, such as h100-80g-sxm = 2.5; here is {', '.join(raw) or 'nothing'}."
            f"{''.join(did_you_mean(key, [TABLE]) for key in raw if key != TABLE)}"
        )
    known = {*catalog.kinds(), *(profile.kind for profile in cluster.profiles)}
    for kind, price in table.items():
        if kind not in known:
            raise UserError(
                f"{name}: {TABLE}.{kind}: no card is called so."
                f"{did_you_mean(kind, known)} `hexijax catalog` lists the cards; the "
                "cluster file declares others."
            )
        if isinstance(price, bool | str) or not 0 <= float(price) < 1e6:
            raise UserError(
                f"{name}: {TABLE}.{kind} is {price!r}; it must be dollars an hour, 0 "
                "or more."
            )
        prices[kind] = float(price)
    return prices


def per_hour(
    devices: Iterable[Device], prices: Mapping[str, float]
) -> tuple[float | None, list[str]]:
    """Dollars an hour of devices, and the kinds whose price is unknown."""
    kinds = [device.kind for device in devices]
    unknown = [kind for kind in dict.fromkeys(kinds) if kind not in prices]
    return (None if unknown else sum(prices[kind] for kind in kinds)), unknown
