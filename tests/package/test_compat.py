"""Each difference between JAX versions, bridged: the same assertions hold on all."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from hexijax import compat


def _equation(closed: core.ClosedJaxpr, primitive: str) -> core.JaxprEqn:
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive.name == primitive)
    return eqn


def _evaluate(closed: core.ClosedJaxpr, *args):
    """A jaxpr interpreter with nothing of its own, so that what it calls is tested."""
    env = dict(zip(compat.all_invars(closed), [*closed.consts, *args], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        outputs = compat.evaluate_equation(eqn, *map(read, eqn.invars))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def test_pieces_of_a_program_run_and_compose():
    table = np.arange(3.0, dtype=np.float32)
    whole = jax.make_jaxpr(lambda x: jnp.sin(x * 2.0) + table)(jnp.ones(3))
    *head, last = whole.jaxpr.eqns
    border = head[-1].outvars
    first = compat.closed_jaxpr(
        whole, invars=whole.jaxpr.invars, outvars=border, eqns=head
    )
    constants = whole.jaxpr.constvars
    second = compat.closed_jaxpr(
        whole,
        invars=[*border, *constants],
        outvars=whole.jaxpr.outvars,
        eqns=[last],
    )
    x = jnp.array([0.1, 0.2, 0.3])
    between = core.jaxpr_as_fun(first)(x)
    (result,) = core.jaxpr_as_fun(second)(*between, *whole.consts)
    np.testing.assert_array_equal(result, jnp.sin(x * 2.0) + table)


def test_a_piece_passes_jaxs_own_checks():
    with jax.enable_checks(True):
        whole = jax.make_jaxpr(lambda x, y: (x + y) * 2.0)(1.0, 2.0)
        eqn = whole.jaxpr.eqns[0]
        piece = compat.closed_jaxpr(
            whole, invars=eqn.invars, outvars=eqn.outvars, eqns=[eqn]
        )
        core.check_jaxpr(piece.jaxpr)
        assert core.jaxpr_as_fun(piece)(1.0, 2.0) == [3.0]


@pytest.mark.parametrize(
    ("primitive", "wrap"), [("jit", jax.jit), ("remat2", jax.checkpoint)]
)
def test_open_and_closed_inner_programs_look_alike(primitive, wrap):
    eqn = _equation(jax.make_jaxpr(lambda x: wrap(jnp.sin)(x))(1.0), primitive)
    inner = compat.as_closed(eqn.params["jaxpr"])
    assert len(compat.all_invars(inner)) == 1
    np.testing.assert_allclose(_evaluate(inner, 0.5), [np.sin(0.5)], rtol=1e-6)


def test_constants_come_before_arguments():
    table = np.arange(4.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: x + table)(1.0)
    constant, argument = compat.all_invars(closed)
    assert (constant.aval.shape, argument.aval.shape) == ((4,), ())


def test_evaluated_equations_equal_the_program():
    def program(x, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        y = jnp.where(kept, jax.nn.relu(x), 0.0)
        total, rows = jax.lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, y)
        return total, rows, jax.checkpoint(jnp.tanh)(x)

    x, key = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), jax.random.key(0)
    closed = jax.make_jaxpr(program)(x, key)
    for got, want in zip(_evaluate(closed, x, key), program(x, key), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_evaluation_keeps_the_equations_context_and_names():
    def program(x):
        with jax.named_scope("blocks_3"), jax.threefry_partitionable(False):
            return jax.random.normal(jax.random.key(0), (4,)) * x

    closed = jax.make_jaxpr(program)(2.0)
    np.testing.assert_array_equal(_evaluate(closed, 2.0)[0], program(2.0))

    again = jax.make_jaxpr(lambda x: _evaluate(closed, x))(2.0)
    assert "blocks_3" in str(_equation(again, "mul").source_info.name_stack)
    assert {e.ctx.threefry_partitionable for e in again.jaxpr.eqns} == {
        e.ctx.threefry_partitionable for e in closed.jaxpr.eqns
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_parts_rebuild_the_scan(reverse):
    rows, scale = jnp.arange(10.0).reshape(5, 2), jnp.array(0.5)

    def step(carry, row):
        total, count = carry
        return (total * scale + row, count + 1), total.sum()

    def program(rows):
        return jax.lax.scan(step, (jnp.zeros(2), 0), rows, reverse=reverse)

    eqn = _equation(jax.make_jaxpr(program)(rows), "scan")
    scan = compat.Scan.of(eqn)
    assert (scan.num_consts, scan.num_carry, scan.length) == (1, 2, 5)
    assert scan.reverse is reverse

    carry, outputs = [jnp.zeros(2), jnp.array(0)], [None] * 5
    for i in reversed(range(5)) if reverse else range(5):
        *carry, outputs[i] = _evaluate(scan.body, scale, *carry, rows[i])
    (total, count), want = program(rows)
    np.testing.assert_allclose(carry[0], total)
    np.testing.assert_allclose(outputs, want)
    assert carry[1] == count == 5


def test_scan_parts_survive_differentiation_and_vmap():
    def loss(w, rows):
        return jax.lax.scan(lambda c, r: (jnp.tanh(c * w + r), None), 0.0, rows)[0]

    rows = jnp.ones((2, 3))
    closed = jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(0.5, rows)
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert len(scans) == 2
    for scan, eqn in ((compat.Scan.of(eqn), eqn) for eqn in scans):
        assert scan.length == 3
        assert len(compat.all_invars(scan.body)) == len(eqn.invars)
        assert 0 < scan.num_carry <= len(eqn.outvars)


def test_compute_on_names_the_host_in_the_lowered_program():
    on_host = compat.compute_on(
        lambda x, y: (x * 2, y + 1),
        compute_type="device_host",
        out_memory_spaces=(jax.memory.Space.Host, jax.memory.Space.Device),
    )
    text = jax.jit(on_host).lower(1.0, 2.0).as_text()
    assert 'compute_type = "host"' in text


def test_shard_map_needs_no_bridge():
    parameters = inspect.signature(jax.shard_map).parameters
    assert {"mesh", "in_specs", "out_specs", "axis_names"} <= parameters.keys()


def test_jaxs_attention_runs_in_float16_on_cpus():
    compat.float16_products_on_cpus()
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, 8, 2, 4), jnp.float16)
        for i in range(3)
    )

    def total(*qkv: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(*qkv, is_causal=True)
        return out.astype(jnp.float32).sum()

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    half, full = grads(q, k, v), grads(*(x.astype(jnp.float32) for x in (q, k, v)))
    for got, want in zip(half, full, strict=True):
        assert got.dtype == jnp.float16
        np.testing.assert_allclose(got, want, atol=5e-3)
