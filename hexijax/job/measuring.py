"""What `hexijax profile` measures, piece by piece, each kept in the file at once.

    Experiment, Chain, Cluster, devices, ProfileFile -> pieces -> Piece.measure -> words

A piece that is in the file is done. One device of each kind is measured, one after
another: what moves between unlike ones waits for both.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job.profile_file import ProfileFile, link_table
from hexijax.layers.chain import Chain, Remat
from hexijax.planner.mesh import compute_dtype, fitting_degrees
from hexijax.report.words import seconds

if TYPE_CHECKING:
    import jax

LARGEST = 64
"""Most samples of a microbatch, where neither the experiment nor the user says."""

DEGREES = (1, 2, 4, 8)
"""Tensor degrees, as far as a node has devices of the kind."""

REMATS = (Remat.NONE, Remat.DOTS, Remat.FULL)


def no_memory(error: Exception) -> bool:
    """Whether an allocation failed: what XLA says on cards and on CPU devices."""
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One thing to measure."""

    what: str
    """In words."""

    done: Callable[[], bool]
    """Whether the file has it, or cannot have it."""

    measure: Callable[[], str]
    """Measures it, writes it, and says in a line what was found."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is measured, and where it is written."""

    experiment: Experiment
    """Whose layers and optimizer."""

    chain: Chain
    """The layers."""

    cluster: Cluster
    """Names and kinds of the devices."""

    devices: "Mapping[str, jax.Device]"
    """JAX's, by name."""

    file: ProfileFile
    """Where figures go."""

    source: Mapping[str, str]
    """By kind, a line that says where its figures come from."""

    sizes: tuple[int, ...]
    """Microbatches whose layers are timed."""

    def pieces(self) -> list[Piece]:
        """All of them: what is quick first, then layers from small microbatches up.

        Each size at all tensor degrees: a larger size is extrapolated when time ends, a
        degree without times is left out of plans.
        """
        first = {d.kind: d.name for d in reversed(self.cluster.devices)}
        kinds = dict.fromkeys(device.kind for device in self.cluster.devices)
        found = [self._card(kind, first[kind]) for kind in kinds]
        found += self._links()
        for node in self.cluster.nodes:
            found.append(self._host_links(node.name))
        for kind in kinds:
            found.append(self._update(kind, first[kind]))
        for node in self.cluster.nodes:
            found.append(self._host_update(node.name))
        meshes = {kind: self._meshes(kind) for kind in kinds}
        for size, at in itertools.product(self.sizes, range(len(DEGREES))):
            for kind, remat in itertools.product(kinds, REMATS):
                if at < len(meshes[kind]):
                    found.append(self._layers(kind, meshes[kind][at], size, remat))
        return found

    # Cards and links.

    def _card(self, kind: str, name: str) -> Piece:
        """Calls, products and memory of a card."""

        def measure() -> str:
            from hexijax.runtime import links, stopwatch

            device, dtype = self.devices[name], self._dtype(name)
            small = device.platform == "cpu"
            flops = links.product_flops_per_s(device, dtype, 512 if small else 8192)
            memory = links.memory_bytes_per_s(device, 2**24 if small else 2**30)
            call_s = stopwatch.dispatch_s(device)
            self.file.note(
                kind,
                call_us=call_s * 1e6,
                waited_call_us=stopwatch.waiting_s(device) * 1e6,
                product_dtype=dtype,
                product_tflops=flops / 1e12,
                memory_gb_per_s=memory / 1e9,
            )
            return (
                f"{flops / 1e12:.3g} TFLOP/s of products in {dtype}, "
                f"{memory / 1e9:.3g} GB/s of memory, a call {seconds(call_s)}"
            )

        return Piece(
            what=f"{kind}: calls, products, memory",
            done=lambda: "memory_gb_per_s" in self.file.about(kind),
            measure=measure,
        )

    def _links(self) -> Iterator[Piece]:
        """Of each two kinds in a node, and each two nodes, one pair."""
        for node in self.cluster.nodes:
            mine = [d for d in self.cluster.devices if d.node == node.name]
            by_kinds: dict[tuple[str, ...], list[tuple[str, str]]] = {}
            for a, b in itertools.combinations(mine, 2):
                key = tuple(sorted({a.kind, b.kind}))
                by_kinds.setdefault(key, []).append((a.name, b.name))
            if len({d.kind for d in mine}) == 1:
                if by_kinds:
                    ((pairs),) = by_kinds.values()
                    yield self._node_link(node.name, pairs[0])
            else:
                for pairs in by_kinds.values():
                    yield self._pair_link("device_pairs", pairs, pairs[0])
        for a, b in itertools.combinations(self.cluster.nodes, 2):
            ends = tuple(
                next(d.name for d in self.cluster.devices if d.node == node.name)
                for node in (a, b)
            )
            yield self._pair_link("node_pairs", [(a.name, b.name)], (ends[0], ends[1]))

    def _node_link(self, node: str, ends: tuple[str, str]) -> Piece:
        def measure() -> str:
            from hexijax.runtime import links

            link = links.link(*(self.devices[end] for end in ends))
            self.file.set_node(node, link=link_table(link))
            return f"{link.bytes_per_s / 1e9:.3g} GB/s, {seconds(link.latency_s)}"

        return Piece(
            what=f"{node}: link {ends[0]} to {ends[1]}",
            done=lambda: "link" in self.file.node(node),
            measure=measure,
        )

    def _pair_link(
        self, level: str, pairs: Sequence[tuple[str, str]], ends: tuple[str, str]
    ) -> Piece:
        def measure() -> str:
            from hexijax.runtime import links

            link = links.link(*(self.devices[end] for end in ends))
            self.file.add_links(level, pairs, link)
            return f"{link.bytes_per_s / 1e9:.3g} GB/s, {seconds(link.latency_s)}"

        return Piece(
            what=f"link {ends[0]} to {ends[1]}",
            done=lambda: self.file.has_link(level, pairs[0]),
            measure=measure,
        )

    def _host_links(self, node: str) -> Piece:
        """Of the first device of each of the node's kinds; the slowest counts."""

        def measure() -> str:
            from hexijax.runtime import links

            rates: list[tuple[float, float]] = []
            for kind, name in self._first_of(node).items():
                found = links.host_links(self.devices[name])
                self.file.note(
                    kind,
                    host_in_bytes_us=[(n, s * 1e6) for n, s in found.inward],
                    host_out_bytes_us=[(n, s * 1e6) for n, s in found.outward],
                )
                rates.append((found.in_bytes_per_s, found.out_bytes_per_s))
            inward, outward = (min(way) / 1e9 for way in zip(*rates, strict=True))
            self.file.set_node(
                node, host_link_gb_per_s=inward, host_out_gb_per_s=outward
            )
            return f"{inward:.3g} GB/s in, {outward:.3g} out, both at once"

        return Piece(
            what=f"{node}: host memory to device and back",
            done=lambda: "host_link_gb_per_s" in self.file.node(node),
            measure=measure,
        )

    # Updates.

    def _update(self, kind: str, name: str) -> Piece:
        """On the device, and streamed through it."""
        model = self.chain.fingerprint()

        def measure() -> str:
            from hexijax.program.program import Site
            from hexijax.runtime.update_timing import update

            given = (self.experiment, self.chain, self.devices, name)
            dtype = self._dtype(name)
            found = update(*given, dtype=dtype, site=Site.DEVICE)
            streamed = update(*given, dtype=dtype, site=Site.STREAMED)
            self.file.note(kind, streamed_mparams_per_s=streamed.params_per_s / 1e6)
            row = {"chain": model, "update_params": found.params}
            row |= {"update_s": found.seconds}
            self.file.add_rows(kind, [row], self.source[kind])
            return (
                f"{found.params_per_s / 1e6:,.3g} million parameters/s on it, "
                f"{streamed.params_per_s / 1e6:,.3g} streamed through it"
            )

        return Piece(
            what=f"{kind}: update",
            done=lambda: any(
                row.get("chain") == model and "update_s" in row
                for row in self.file.rows(kind)
            ),
            measure=measure,
        )

    def _host_update(self, node: str) -> Piece:
        def measure() -> str:
            from hexijax.program.program import Site
            from hexijax.runtime.update_timing import update

            (kind, name), *_ = self._first_of(node).items()
            given = (self.experiment, self.chain, self.devices, name)
            found = update(*given, dtype=self._dtype(name), site=Site.HOST)
            beside = found.beside
            assert beside, "the host's update is timed beside copies"
            rate, alone = (
                found.params / 1e6 / max(s, 1e-9)
                for s in (found.seconds, beside.alone_s)
            )
            copies, back = (
                each / 1e9
                for each in (beside.copies_bytes_per_s, beside.return_bytes_per_s)
            )
            self.file.set_node(
                node,
                host_update_mparams_per_s=max(rate, 1e-3),
                host_return_gb_per_s=max(back, 1e-3),
            )
            self.file.note(
                kind,
                host_update_alone_mparams_per_s=alone,
                host_beside_update_gb_per_s=copies,
            )
            return (
                f"{rate:,.3g} million parameters/s beside copies of {copies:.3g} GB/s "
                f"each way ({alone:,.3g} alone); back to the device {back:.3g} GB/s"
            )

        return Piece(
            what=f"{node}: update by the host",
            done=lambda: "host_update_mparams_per_s" in self.file.node(node),
            measure=measure,
        )

    # Layers.

    def _layers(
        self, kind: str, mesh: tuple[str, ...], size: int, remat: Remat
    ) -> Piece:
        dtype, degree = self._dtype(mesh[0]), len(mesh)
        model = _digest(self._signatures(mesh[0]))
        key = {"dtype": dtype, "tensor": degree, "remat": remat.value}

        def done() -> bool:
            rows = [r for r in self.file.rows(kind) if key.items() <= r.items()]
            if any(r.get("layers") == model and r["samples"] <= size for r in rows):
                return True
            there = {r.get("signature") for r in rows if r["samples"] == size}
            return self._signatures(mesh[0]) <= there

        def measure() -> str:
            import jax

            from hexijax.runtime.layer_timing import layer_rows

            try:
                rows = layer_rows(
                    self.experiment,
                    self.chain,
                    self.cluster,
                    self.devices,
                    mesh,
                    dtype=dtype,
                    samples=size,
                    remat=remat,
                )
            except jax.errors.JaxRuntimeError as error:
                row: dict[str, Any] = {"layers": model, **key, "samples": size}
                says = str(error).splitlines()[0]
                if no_memory(error):
                    row["out_of_memory"] = True
                    says = "out of memory"
                else:
                    row["refused"] = says
                self.file.add_rows(kind, [row], self.source[kind])
                return f"{says}; larger microbatches are left out"
            self.file.add_rows(kind, rows, self.source[kind])
            by_layer = {row["signature"]: row for row in rows}
            mine = [by_layer[layer.signature] for layer in self._layers_on(mesh[0])]
            forward_s, backward_s = (
                sum(row[f"{way}_s"] for row in mine) for way in ("forward", "backward")
            )
            return (
                f"all layers {seconds(forward_s)} forward, "
                f"{seconds(backward_s)} backward"
            )

        words = f"{kind}: microbatch {size}, remat {remat.value}"
        return Piece(
            what=words + (f", tensor {degree}" if degree > 1 else ""),
            done=done,
            measure=measure,
        )

    def _meshes(self, kind: str) -> list[tuple[str, ...]]:
        """The first devices of the kind in the node that has most of it, by degree."""
        by_node: dict[str, list[str]] = {}
        for device in self.cluster.devices:
            if device.kind == kind:
                by_node.setdefault(device.node, []).append(device.name)
        most = max(by_node.values(), key=len)
        cut = any(leaf.tensor_dim is not None for leaf in self.chain.leaves())
        degrees = fitting_degrees(self.chain, DEGREES) if cut else (1,)
        return [tuple(most[:n]) for n in degrees if n <= len(most)]

    def _first_of(self, node: str) -> dict[str, str]:
        """The first device of each kind in a node."""
        mine = [d for d in self.cluster.devices if d.node == node]
        return {d.kind: d.name for d in reversed(mine)}

    def _dtype(self, name: str) -> str:
        return compute_dtype(self.experiment.dtype, self.cluster.device(name))

    def _layers_on(self, name: str) -> Sequence[Any]:
        from hexijax.costs.compute import fused_attention

        profile = self.cluster.device(name).profile
        fused = fused_attention(profile, self._dtype(name))
        return self.chain.layers_under(fused_attention=fused)

    def _signatures(self, name: str) -> set[str]:
        return {layer.signature for layer in self._layers_on(name)}


def usual_sizes(experiment: Experiment) -> tuple[int, ...]:
    """Powers of two up to what a microbatch of the experiment may be."""
    most = min(experiment.batch_size, experiment.max_microbatch_size or LARGEST)
    return tuple(2**n for n in range(most.bit_length()) if 2**n <= most)


def _digest(signatures: set[str]) -> str:
    """Equal for the same layers on the same shapes."""
    return hashlib.sha256(" ".join(sorted(signatures)).encode()).hexdigest()[:12]
