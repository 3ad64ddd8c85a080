"""Next-token loss and KL to the dense model, in chunks of the sequence.

The logits of a whole batch are never held: at T 2048 x 16 rows and V 49,152
they would take 6.4 GB in float32. Each chunk's logits are recomputed in the
backward pass. Chunks are cut along T, so a sharded batch axis stays sharded.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from wide_jax.axes import Hidden, Scalar

CHUNK_LOGITS = 1 << 28  # logits held at once, over all rows: 1 GiB in float32


def _chunks(rows: int, length: int, vocab: int) -> int:
  """Number of equal chunks of the sequence: the fewest that fit.

  One token of every row at a time is the least there is.
  """
  want = max(-(-rows * length * vocab // CHUNK_LOGITS), 1)
  want = min(want, length)
  return next(n for n in range(want, length + 1) if length % n == 0)


def _split(x: Array, n: int) -> Array:
  """[B, T, ...] -> [n, B, T/n, ...]."""
  b, t = x.shape[:2]
  return jnp.swapaxes(x.reshape(b, n, t // n, *x.shape[2:]), 0, 1)


def _logits(hidden_BTD, table_VD):
  return jnp.einsum(
    "BTD,VD->BTV", hidden_BTD, table_VD, preferred_element_type=jnp.float32
  )


def token_losses(
  hidden_BTD: Hidden,
  table_VD: Float[Array, "V D"],
  targets_BT: Int[Array, "B T"],
) -> Float[Array, "B T"]:
  """Negative log-likelihood of each target, float32, nats."""
  n = _chunks(*targets_BT.shape, table_VD.shape[0])

  @jax.checkpoint
  def chunk(hidden, targets):
    logits = _logits(hidden, table_VD)
    at_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - at_target

  if n == 1:
    return chunk(hidden_BTD, targets_BT)
  out = jax.lax.map(
    lambda xs: chunk(*xs), (_split(hidden_BTD, n), _split(targets_BT, n))
  )
  return jnp.swapaxes(out, 0, 1).reshape(targets_BT.shape)


def next_token_loss(
  hidden_BTD: Hidden,
  table_VD: Float[Array, "V D"],
  targets_BT: Int[Array, "B T"],
  weights_BT: Float[Array, "B T"],
) -> Scalar:
  """Sum over targets of weight * negative log-likelihood, in nats.

  A token of weight 0 adds nothing to value or gradient, whatever its target.
  """
  # An index outside the vocabulary (-100, say) gathers a NaN, times 0 a NaN.
  targets_BT = jnp.where(weights_BT > 0, targets_BT, 0)
  return (token_losses(hidden_BTD, table_VD, targets_BT) * weights_BT).sum()


def kl_to_dense(
  hidden_BTD: Hidden,
  dense_BTD: Hidden,
  table_VD: Float[Array, "V D"],
  weights_BT: Float[Array, "B T"],
) -> Scalar:
  """Sum over tokens of weight * KL(dense || pruned), in nats.

  `dense_BTD` is the hidden state of the same weights with all gates open; no
  gradient flows into it.
  """
  n = _chunks(*weights_BT.shape, 2 * table_VD.shape[0])

  @jax.checkpoint
  def chunk(hidden, dense, weights):
    log_q = jax.nn.log_softmax(_logits(hidden, table_VD), -1)
    log_p = jax.nn.log_softmax(_logits(dense, table_VD), -1)
    return ((jnp.exp(log_p) * (log_p - log_q)).sum(-1) * weights).sum()

  parts = (hidden_BTD, jax.lax.stop_gradient(dense_BTD), weights_BT)
  if n == 1:
    return chunk(*parts)
  split = jax.tree.map(functools.partial(_split, n=n), parts)
  return jax.lax.map(lambda xs: chunk(*xs), split).sum()
