"""Cards are woken without a word of what is wrong with them."""

import threading
from pathlib import Path

import jax
import pytest

from hexijax.job.clusters import read_cluster
from hexijax.runtime.waking import touch, wake


def test_cards_that_are_not_there_are_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    thread = wake(read_cluster(Path("experiments/clusters/h100_x4.toml")))
    thread.join(60)
    assert not thread.is_alive()
    assert not raised


def test_cpu_devices_are_awake_already():
    before = len(jax.live_arrays())
    touch({"a/0": jax.devices()[0], "a/1": jax.devices()[1]})
    assert len(jax.live_arrays()) == before
