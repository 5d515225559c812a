"""The chain as a plain-text table, for people."""

from collections.abc import Sequence

from hexijax.layers.chain import Chain, Group, Layer, Remat

_HEADS = (
    "layer",
    "parameters",
    "forward GFLOP",
    "backward",
    "border MiB",
    "kept MiB: none",
    "dots",
    "full",
)


def chain_table(chain: Chain) -> str:
    """One line a layer, equal neighbours as one; figures are per sample.

    ``blocks/0..5 x6`` stands for six layers; their line shows one of them. Tied
    parameters count in the layer that reads them first.
    """
    rows: list[tuple[str, ...]] = [_HEADS]
    counted: set[str] = set()
    for layers in _runs(chain):
        new = [chain.group(g) for g in layers[0].groups if g not in counted]
        counted.update(name for layer in layers for name in layer.groups)
        rows.append(_row(layers, new))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    tied = [group for group in chain.groups if len(group.layers) > 1]
    names = [layer.name for layer in chain.layers]
    lines += ["", f"{chain.num_params:,} parameters, computed in {chain.dtype}"]
    lines += [
        f"{group.name} is tied: {', '.join(names[i] for i in group.layers)}"
        for group in tied
    ]
    lines += [f"note: {note}" for note in chain.notes]
    return "\n".join(lines)


def _runs(chain: Chain) -> list[list[Layer]]:
    """Neighbours that run the same equations, together."""
    runs: list[list[Layer]] = []
    for layer in chain.layers:
        if runs and runs[-1][-1].signature == layer.signature:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _row(layers: Sequence[Layer], groups: Sequence[Group]) -> tuple[str, ...]:
    first = layers[0]
    name = first.name
    if len(layers) > 1:
        name = f"{name}..{layers[-1].name.rsplit('/', 1)[-1]} x{len(layers)}"
    kept = (first.activation_bytes[remat] for remat in Remat)
    return (
        name,
        f"{sum(group.size for group in groups):,}",
        f"{first.forward_flops / 1e9:.3f}",
        f"{first.backward_flops / 1e9:.3f}",
        f"{first.border_bytes / 2**20:.3f}",
        *(f"{num_bytes / 2**20:.3f}" for num_bytes in kept),
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *figures = row
    cells = [name.ljust(widths[0])]
    cells += [x.rjust(w) for x, w in zip(figures, widths[1:], strict=True)]
    return "  ".join(cells)
