"""Layer latencies of Cephalo (github.com/benson-guo/cephalo, MIT) and best splits.

    layer_latency.json -> latency(gpu, model) -> LayerLatency -> cycle_s(size, count)
    golden.json        -> golden_cases -> GoldenCase: devices, batch, optimum

A layer's cycle is its forward, the same again as recomputation, and its backward, for
each of ``count`` microbatches, and 10 ms for each but the first. A microbatch beyond
the measured table is priced by the source's own line.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.published.files import PublishedDataError, read, records

EXTRA_MICROBATCH_S = 0.010
"""What each microbatch but the first adds, by the rule in ``golden.json``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerLatency:
    """One layer of one model on one card."""

    gpu: str
    """The card."""

    forward_table_s: tuple[float, ...]
    """Of microbatches of 1, 2, ... samples."""

    backward_table_s: tuple[float, ...]
    """The same, without recomputation."""

    forward_line_s: tuple[float, float]
    """Per sample and intercept, beyond the table; the intercept may be negative."""

    backward_line_s: tuple[float, float]
    """The same of the backward."""

    def forward_s(self, size: int) -> float:
        """Seconds of a microbatch's forward."""
        return _at(self.forward_table_s, self.forward_line_s, size)

    def backward_s(self, size: int) -> float:
        """Seconds of its backward."""
        return _at(self.backward_table_s, self.backward_line_s, size)

    def first_s(self, size: int) -> float:
        """Of the first microbatch of a cycle."""
        return 2 * self.forward_s(size) + self.backward_s(size)

    def next_s(self, size: int) -> float:
        """What each further microbatch adds."""
        return self.first_s(size) + EXTRA_MICROBATCH_S

    def cycle_s(self, size: int, count: int) -> float:
        """Seconds of ``count`` microbatches of ``size`` samples through the layer."""
        return self.first_s(size) + (count - 1) * self.next_s(size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GoldenCase:
    """A cluster, a batch, and the least cycle that any split of it reaches."""

    name: str
    """Its id."""

    devices: tuple[LayerLatency, ...]
    """In the record's order."""

    batch_size: int
    """Samples; each device takes at least one, in whole microbatches of one size."""

    optimal_cycle_s: float
    """Of the slowest device under the best split."""

    optimal_samples: tuple[int, ...]
    """One best split; others may reach the same cycle."""

    optimal_sizes: tuple[int, ...]
    """Its microbatch sizes."""

    even_cycle_s: float
    """With equal shares, each as one microbatch."""

    record: Mapping[str, Any]
    """All that the source says."""


def latency(
    folder: Path | str, gpu: str, model: str, dtype: str, sequence_length: int
) -> LayerLatency:
    """The record of one card and model.

    Raises:
      PublishedDataError: it was not measured.
    """
    data = read(folder, "cephalo", "layer_latency")
    wanted = {"model": model, "dtype": dtype, "sequence_length": sequence_length}
    found = records(data, "records", gpu=gpu, **wanted)
    if not found:
        cards = sorted({record["gpu"] for record in records(data, "records", **wanted)})
        raise PublishedDataError(
            f"{model} in {dtype} with sequence {sequence_length} on {gpu} was asked "
            f"for; it was measured on {', '.join(cards) or 'no card'}."
        )
    record = found[0]
    return LayerLatency(
        gpu=gpu,
        forward_table_s=tuple(record["fwd_s"] or ()),
        backward_table_s=tuple(record["bwd_s"] or ()),
        forward_line_s=_line(record["fwd_line"]),
        backward_line_s=_line(record["bwd_line"]),
    )


def golden_cases(folder: Path | str) -> tuple[GoldenCase, ...]:
    """Every record of ``golden.json``."""
    data = read(folder, "cephalo", "golden")
    return tuple(
        GoldenCase(
            name=record["id"],
            devices=tuple(
                latency(
                    folder,
                    gpu,
                    record["model"],
                    record["dtype"],
                    record["sequence_length"],
                )
                for gpu in record["gpus"]
            ),
            batch_size=record["global_batch"],
            optimal_cycle_s=record["optimal_cycle_s"],
            optimal_samples=tuple(record["optimal_samples"]),
            optimal_sizes=tuple(record["optimal_mbs"]),
            even_cycle_s=record["even_cycle_s"],
            record=record,
        )
        for record in data["records"]
    )


def _at(table_s: tuple[float, ...], line_s: tuple[float, float], size: int) -> float:
    if size <= len(table_s):
        return table_s[size - 1]
    per_sample_s, intercept_s = line_s
    return per_sample_s * size + intercept_s


def _line(line: Mapping[str, float]) -> tuple[float, float]:
    return line["per_sample_s"], line["intercept_s"]
