"""How torch's modules hold what Flax's hold: their linears are [out, in]."""

from hexijax.weights.names import Named


def linear(name: str) -> Named:
    """The weight of a linear."""
    return Named(name=name, axes="o i -> i o")


def dense(ours: str, theirs: str) -> dict[str, str | Named]:
    """A linear with its bias."""
    return {
        f"{ours}/kernel": linear(f"{theirs}.weight"),
        f"{ours}/bias": f"{theirs}.bias",
    }


def norm(ours: str, theirs: str) -> dict[str, str | Named]:
    """A LayerNorm."""
    return {f"{ours}/scale": f"{theirs}.weight", f"{ours}/bias": f"{theirs}.bias"}
