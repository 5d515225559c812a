"""Says why no plan fits, with the numbers of every kind of device."""

import collections
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.activations import held_bytes, layer_params
from hexijax.costs.memory import room_bytes
from hexijax.costs.sums import GRAD_BYTES, STATE_BYTES
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import PlanError
from hexijax.planner.mesh import compute_dtype
from hexijax.planner.options import PlanOptions


class InfeasiblePlanError(PlanError):
    """No plan fits, and why."""


def explain_infeasible(
    chain: Chain,
    cluster: Cluster,
    batch_size: int,
    dtype: str,
    options: PlanOptions,
    reasons: Sequence[str] = (),
) -> str:
    """What the model needs at least, what the devices have, and a way out."""
    item = min(ITEM_BYTES[compute_dtype(dtype, d)] for d in cluster.devices)
    trained_bytes = GRAD_BYTES + STATE_BYTES * (1 + options.moments)
    need = chain.num_params * item + chain.num_trained * trained_bytes
    have = sum(map(room_bytes, cluster.devices))
    kinds = collections.Counter(
        (device.kind, room_bytes(device)) for device in cluster.devices
    )
    devices = ", ".join(
        f"{count} x {kind} with {usable:,}" for (kind, usable), count in kinds.items()
    )
    num_layers, num_devices = len(chain.layers), len(cluster.devices)
    asked = _asked(options)
    head = (
        f"No split of the {num_layers} layers of {chain.name} over {num_devices} "
        f"devices fits in memory{asked}: the layers hold {need:,} bytes of parameters, "
        f"gradients and state, and the devices have {have:,} usable together "
        f"({devices})."
    )
    if options.schedule is None:
        stays = chain.num_trained * trained_bytes
        head += (
            " Where parameters are gathered for each pass and freed after it, sums of "
            f"gradients and state stay, {stays:,} bytes."
        )
    if need <= have:
        sizes = [held_bytes(chain, (i, i + 1), 1, dtype) for i in range(num_layers)]
        trained = layer_params(chain, 1)
        each = [
            h.handed + n * trained_bytes for h, n in zip(sizes, trained, strict=True)
        ]
        largest = max(range(num_layers), key=lambda i: each[i])
        head += (
            f" Activations come on top, and layers are not cut: the largest, "
            f"{chain.layers[largest].name}, alone takes {each[largest]:,} "
            "where its state is not spread."
        )
    why = f" The last layout was refused because: {reasons[-1]}" if reasons else ""
    return f"{head} {_way_out(batch_size, options)}{why}"


def _asked(options: PlanOptions) -> str:
    """What was asked for that rules plans out."""
    if options.layers_per_stage:
        splits = " and ".join(
            "+".join(map(str, split)) for split in options.layers_per_stage
        )
        return f" with {splits} layers a stage, as asked"
    default = PlanOptions()
    changed = [
        f"{name} {getattr(options, name)}"
        for name in (
            "schedule",
            "grouping",
            "max_microbatch_size",
            "per_microbatch",
            "use_all_devices",
        )
        if getattr(options, name) != getattr(default, name)
    ]
    return f" with {', '.join(changed)}, as asked" if changed else ""


def _way_out(batch_size: int, options: PlanOptions) -> str:
    ways = ["add devices, or devices with more memory"]
    if _asked(options):
        ways.insert(0, "ask for less")
    if batch_size > 1:
        ways.append("a smaller sample (shorter sequences)")
    return f"{ways[0][0].upper()}{', or '.join(ways)[1:]}."
