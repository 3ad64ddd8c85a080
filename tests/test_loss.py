"""Chunked losses: value and gradients, weights, KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import jit

from wide_jax import loss

V, D = 29, 12


def make(rows, length, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  hidden, dense = (
    jnp.asarray(rng.standard_normal((rows, length, D)), dtype) for _ in range(2)
  )
  table = jnp.asarray(rng.standard_normal((V, D)), dtype)
  targets = jnp.asarray(rng.integers(0, V, (rows, length)), jnp.int32)
  weights = jnp.asarray(rng.integers(0, 2, (rows, length)), jnp.float32)
  return hidden, dense, table, targets, weights


def log_softmax(hidden, table):
  logits = np.float64(hidden) @ np.float64(table).T
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def brute_loss(hidden, table, targets, weights):
  log_p = log_softmax(hidden, table)
  picked = np.take_along_axis(log_p, np.asarray(targets)[..., None], -1)
  return -(picked[..., 0] * np.float64(weights)).sum()


def brute_kl(hidden, dense, table, weights):
  log_q, log_p = log_softmax(hidden, table), log_softmax(dense, table)
  return ((np.exp(log_p) * (log_p - log_q)).sum(-1) * np.float64(weights)).sum()


# Lengths of one, some and all factors; limits that ask for one chunk, some,
# one a token, and more than there are tokens.
@pytest.mark.parametrize("rows,length", [(2, 12), (3, 13), (1, 17)])
@pytest.mark.parametrize("limit", [1 << 28, 10 * V, 1])
def test_chunks_change_nothing(rows, length, limit, monkeypatch):
  hidden, dense, table, targets, weights = make(rows, length)

  def both(hidden, table):
    nll = loss.next_token_loss(hidden, table, targets, weights)
    return nll, loss.kl_to_dense(hidden, dense, table, weights)

  def total(hidden, table):
    return sum(both(hidden, table))

  monkeypatch.setattr(loss, "CHUNK_LOGITS", limit)
  assert length % loss._chunks(rows, length, V) == 0
  got = jit(lambda *a: (both(*a), jax.grad(total, (0, 1))(*a)))(hidden, table)
  nll, kl = (
    brute_loss(hidden, table, targets, weights),
    brute_kl(hidden, dense, table, weights),
  )
  np.testing.assert_allclose(got[0], (nll, kl), rtol=1e-5)
  # Gradients: softmax minus one-hot, and softmax minus the dense one.
  probs, teacher = (np.exp(log_softmax(h, table)) for h in (hidden, dense))
  delta = (2 * probs - np.eye(V)[np.asarray(targets)] - teacher) * np.float64(
    weights
  )[..., None]
  np.testing.assert_allclose(
    got[1][0], delta @ np.float64(table), rtol=0, atol=2e-5
  )


@pytest.mark.parametrize("limit", [1 << 28, 2 * V])
def test_the_head_gets_its_gradient_through_the_chunks(limit, monkeypatch):
  hidden, _, table, targets, weights = make(2, 13)
  monkeypatch.setattr(loss, "CHUNK_LOGITS", limit)
  got = jit(jax.grad(loss.next_token_loss, 1))(hidden, table, targets, weights)
  probs = np.exp(log_softmax(hidden, table))
  delta = (probs - np.eye(V)[np.asarray(targets)]) * np.float64(weights)[
    ..., None
  ]
  want = np.einsum("BTV,BTD->VD", delta, np.float64(hidden))
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("garbage", [-1, -100, V, 2**30])
def test_weight_0_adds_nothing_whatever_the_target(garbage):
  hidden, _, table, targets, weights = make(2, 7)
  weights = weights.at[0, 0].set(0).at[1, 3].set(1)
  odd = jnp.where(weights > 0, targets, garbage)

  def both(targets):
    return jit(jax.value_and_grad(loss.next_token_loss, (0, 1)))(
      hidden, table, targets, weights
    )

  value, grads = both(odd)
  want, want_grads = both(targets)
  np.testing.assert_array_equal(value, want)
  jax.tree.map(np.testing.assert_array_equal, grads, want_grads)
  assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
  assert (np.asarray(grads[0])[np.asarray(weights) == 0] == 0).all()


def test_nothing_to_learn_is_zero():
  hidden, dense, table, targets, weights = make(2, 7)
  zero = jnp.zeros_like(weights)
  grad = jax.grad(loss.next_token_loss)(hidden, table, targets, zero)
  assert loss.next_token_loss(hidden, table, targets, zero) == 0
  assert loss.kl_to_dense(hidden, dense, table, zero) == 0
  assert not np.asarray(grad).any()


def test_kl_is_zero_for_the_same_model_and_positive_otherwise():
  hidden, dense, table, _, weights = make(3, 8)
  assert loss.kl_to_dense(hidden, hidden, table, weights) == 0
  for scale in (1.0, 1e-2):
    moved = hidden + scale * (dense - hidden)
    assert loss.kl_to_dense(moved, hidden, table, weights) > 0


def test_no_gradient_flows_into_the_dense_model():
  hidden, dense, table, _, weights = make(3, 8)
  student, teacher = jax.grad(loss.kl_to_dense, (0, 1))(
    hidden, dense, table, weights
  )
  assert np.asarray(student).any() and not np.asarray(teacher).any()


def test_bfloat16_logits_are_summed_in_float32():
  """The inputs are bfloat16, the result as exact as their float64 loss."""
  hidden, _, table, targets, weights = make(2, 12, dtype=jnp.bfloat16)
  got = loss.next_token_loss(hidden, table, targets, weights)
  assert got.dtype == jnp.float32
  want = brute_loss(hidden, table, targets, weights)
  np.testing.assert_allclose(got, want, rtol=1e-5)
