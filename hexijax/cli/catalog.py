"""`hexijax catalog`: the cards whose figures are known."""

from hexijax.cluster import catalog as cards
from hexijax.cluster.profile import DeviceProfile
from hexijax.costs.rates import defaults

_COLUMNS = ("kind", "GiB", "usable", "TFLOP/s", "in", "GB/s", "host GB/s", "runs with")


def catalog() -> int:
    """Prints one line a card; the figures' sources lie beside them in the package."""
    rows = [_COLUMNS, *(_row(profile) for profile in cards.profiles().values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for kind, *cells in rows:
        padded = (
            cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)
        )
        print(f"{kind.ljust(widths[0])}  {'  '.join(padded)}")
    print(
        f"\n{len(rows) - 1} cards. Dense peaks; usable is what JAX gets of the memory."
    )
    print("\nOf its peak a kind is taken to sustain, where it was not measured:")
    for line in defaults():
        print(f"  {line}")
    print("Beside a profile file: python -m hexijax.costs.revising FILE")
    return 0


def _row(profile: DeviceProfile) -> tuple[str, ...]:
    dtype = profile.train_dtype
    return (
        profile.kind,
        f"{profile.nominal_memory_bytes / 2**30:.0f}",
        f"{profile.usable_memory_bytes / 2**30:.1f}",
        f"{profile.dense_flops_per_s[dtype] / 1e12:.4g}",
        dtype,
        f"{profile.memory_bytes_per_s / 1e9:.0f}",
        f"{profile.host_link_bytes_per_s / 1e9:.0f}",
        _runs_with(profile),
    )


def _runs_with(profile: DeviceProfile) -> str:
    if not profile.jax_runs:
        return "planned only"
    return f"hexijax[{profile.jax_extra}]" if profile.jax_extra else "hexijax"
