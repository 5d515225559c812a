"""What can be chosen for a layer, and the profile that the choice starts from.

Data only. Times are seconds of one microbatch or one update with nothing else running;
bytes are those of one device and, where it says so, of its host.
"""

import dataclasses
import enum
from collections.abc import Mapping

from hexijax.costs.host_rates import HostSide
from hexijax.costs.rates import HOST_PIECE_S
from hexijax.costs.sums import CHUNKS_ON_DEVICE
from hexijax.layers.chain import Remat


class Weights(enum.StrEnum):
    """Where a layer's parameters lie between its passes."""

    KEPT = "kept"
    """On the device."""
    STREAMED = "streamed"
    """In pinned host memory; brought in for each pass, gone after it."""


class State(enum.StrEnum):
    """Where masters and moments lie, and where they are updated."""

    DEVICE = "device"
    """On the device, updated there."""
    STREAMED = "streamed"
    """On the host, updated on the device, chunk by chunk."""
    HOST = "host"
    """On the host, updated there."""


class Kept(enum.StrEnum):
    """What a layer keeps for its backward, and where."""

    NONE = "none"
    """All that remat none keeps."""
    DOTS = "dots"
    """Outputs of products."""
    FULL = "full"
    """Its input."""
    HOST = "host"
    """Outputs of products, in pinned host memory."""

    @property
    def remat(self) -> Remat:
        """The policy its programs are compiled with."""
        return REMATS[self]


REMATS = {
    Kept.NONE: Remat.NONE,
    Kept.DOTS: Remat.DOTS,
    Kept.FULL: Remat.FULL,
    Kept.HOST: Remat.DOTS,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoice:
    """One layer's placement."""

    weights: Weights = Weights.KEPT
    state: State = State.DEVICE
    kept: Kept = Kept.NONE


Choice = tuple[LayerChoice, ...]
"""One a layer, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer of a stage on one of its devices."""

    name: str
    """As the chain calls it."""

    forward_s: Mapping[Remat, float]
    """Of one microbatch."""

    backward_s: Mapping[Remat, float]
    """Of one microbatch, what is computed again included."""

    recompute_s: Mapping[Remat, float]
    """Of the backward, what is computed again."""

    resident_update_s: float
    """Of its parameters on the device, their state there."""

    num_params: int
    """That train; a tied array counts at its first user."""

    homed_params: int
    """Of them, those whose state this device is home of."""

    weights_bytes: int
    """As computed with."""

    grads_bytes: int
    """One accumulator."""

    state_bytes: int
    """Masters and moments at home here."""

    chunk_bytes: int
    """The largest piece of its state that is updated at once; leaves are not cut."""

    kept_bytes: Mapping[Remat, int]
    """From a microbatch's forward to its backward, its input included."""

    working_bytes: Mapping[Remat, int]
    """Alive inside its backward only."""

    state_pieces: int = 0
    """Arrays in which its state comes and leaves."""

    weights_pieces: int = 0
    """Arrays of its parameters, and of its gradient."""

    kept_pieces: int = 0
    """Arrays of what it keeps of a microbatch, where that goes to the host."""

    reduce_s: float = 0.0
    """To sum its gradient over cards that hold parts of its state."""

    gather_s: float = 0.0
    """To bring new parameters from them."""

    last_user: int | None = None
    """The last layer that adds to its gradient; None: itself."""

    @property
    def trains(self) -> bool:
        """Whether anything of it is updated."""
        return self.num_params > 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A run of layers on one device, and the host beside it."""

    layers: tuple[LayerProfile, ...]
    """In order."""

    host: HostSide
    """Rates and room."""

    device_bytes: int
    """What one device has for all of it."""

    fixed_bytes: int = 0
    """On the device whatever is chosen: batches, borders on their way."""

    microbatches: int = 1
    """Of a step; each goes forward and backward before the next."""

    grads_stay: bool = False
    """Room is kept for all gradients at once, however soon updates follow."""

    early_updates: bool = True
    """A layer may be updated before the step's last backward has ended: no clipping."""

    chunks: int = CHUNKS_ON_DEVICE
    """Of state on the device at once, those on their way to the host included."""

    piece_s: float = HOST_PIECE_S
    """Of each array that is copied, beside its bytes."""

    def in_s(self, num_bytes: float, pieces: int) -> float:
        """Seconds of so many arrays from pinned memory into the device."""
        return pieces * self.piece_s + num_bytes / self.host.in_bytes_per_s

    def out_s(self, num_bytes: float, pieces: int) -> float:
        """The same out of it."""
        return pieces * self.piece_s + num_bytes / self.host.out_bytes_per_s

    def state_s(self, layer: int) -> tuple[float, float]:
        """Seconds in which a layer's state comes, and in which it leaves."""
        own = self.layers[layer]
        moved = own.state_bytes, own.state_pieces
        return self.in_s(*moved), self.out_s(*moved)

    def grads_s(self, layer: int) -> float:
        """Seconds in which a layer's gradient goes to the host that updates it."""
        own = self.layers[layer]
        return self.out_s(own.homed_params * GRAD_BYTES, own.weights_pieces)

    def update_s(self, layer: int) -> dict[State, float]:
        """Seconds of a layer's update at each site, when updates follow each other."""
        own, host = self.layers[layer], self.host
        returned_bytes = own.weights_bytes * own.homed_params / max(1, own.num_params)
        return {
            State.DEVICE: own.resident_update_s,
            State.STREAMED: max(
                own.resident_update_s,
                *self.state_s(layer),
            ),
            State.HOST: max(
                own.homed_params / host.update_params_per_s,
                self.grads_s(layer),
                returned_bytes / host.return_bytes_per_s,
            ),
        }


GRAD_BYTES = 4
"""Of a gradient, for each parameter."""

WEIGHT_SLOTS = 2
"""Layers whose streamed parameters are on the device at once."""

CHUNK_SLOTS = 3
"""Chunks on the way at once: one comes, one is updated, one leaves."""

RESIDUAL_SLOTS = 2
"""Layers whose residuals are on their way to the host, or back."""
