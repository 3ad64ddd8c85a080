"""Rotary position embedding: frequencies of every supported kind, and angles.

Frequencies are made once, in float64, on the host. Angles are made on the
device from integer positions by fixed-point arithmetic, so that they are as
good at position 131,071 as at position 1: a float32 product `position * freq`
is off by up to `position * 2**-24` radians, 0.008 there (trial A2), and any
16-bit type is far worse.
"""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from wide_jax.model_config import ModelConfig, RopeConfig

_TURN = 2 * math.pi


def frequencies(
  rope: RopeConfig, head_dim: int
) -> tuple[Float[np.ndarray, " H2"], float]:
  """Angular frequency of each pair of channels, in radians a position.

  `dynamic` follows one stated rule: up to the trained length it is `default`,
  exactly (transformers does the same), and `check_length` refuses more, since
  frequencies that move with the length contradict keys already in a cache.

  Args:
    rope: kind and constants.
    head_dim: H, even.

  Returns:
    float64 `[H/2]`, and the factor that multiplies cos and sin (1.0 but for
    `yarn`).

  Raises:
    ValueError: an odd head_dim, or divisors of another length.

  Sources: Su et al. 2021 (arXiv 2104.09864); llama3 as in transformers'
  `modeling_rope_utils`; YaRN, Peng et al. 2023 (arXiv 2309.00071).
  """
  if head_dim < 2 or head_dim % 2:
    raise ValueError(f"head_dim={head_dim} must be even and at least 2.")
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  base = float(rope.theta) ** -exponent
  if rope.kind in ("default", "dynamic"):
    return base, 1.0
  if rope.kind == "linear":
    return base / rope.factor, 1.0
  if rope.kind == "llama3":
    return _llama3(rope, base), 1.0
  if rope.kind == "yarn":
    return _yarn(rope, base), _yarn_attention_factor(rope)
  if rope.kind == "divisors":
    divisors = np.asarray(rope.divisors, np.float64)
    if divisors.shape != base.shape:
      raise ValueError(
        f"{divisors.size} rope divisors for head_dim={head_dim}; want"
        f" {base.size}."
      )
    return base / divisors, 1.0
  raise ValueError(f"rope_type={rope.kind!r} is not supported.")


def _llama3(rope: RopeConfig, base):
  """Long waves are divided by `factor`, short ones kept, a ramp between."""
  waves = rope.original_max_positions * base / _TURN  # in the trained length
  low, high = rope.low_freq_factor, rope.high_freq_factor
  if high <= low:
    raise ValueError(
      f"high_freq_factor={high} must exceed low_freq_factor={low}."
    )
  keep = np.clip((waves - low) / (high - low), 0.0, 1.0)
  return keep * base + (1 - keep) * base / rope.factor


def _yarn(rope: RopeConfig, base):
  """Interpolates slow dimensions, leaves fast ones alone (NTK by parts)."""
  half = base.size

  def dimension(turns: float) -> float:
    """The (fractional) index whose wave makes `turns` in the trained length."""
    wave = rope.original_max_positions / (turns * _TURN)
    return half * math.log(wave) / math.log(rope.theta)

  low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * half - 1)
  if low == high:
    high += 0.001  # transformers' guard against an empty ramp
  slow = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
  return slow * base / rope.factor + (1 - slow) * base


def _yarn_attention_factor(rope: RopeConfig) -> float:
  if rope.attention_factor is not None:
    return float(rope.attention_factor)

  def temperature(scale: float) -> float:
    if rope.factor <= 1:
      return 1.0
    return 0.1 * scale * math.log(rope.factor) + 1.0

  if rope.mscale and rope.mscale_all_dim:
    return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
  return temperature(1.0)


def cos_sin(
  positions_BT: Int[Array | np.ndarray, "B T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
  """cos and sin of every position's angles, float32 `[B, T, H/2]`.

  The frequency in turns is held as a whole number of 2**-32 turns plus a small
  remainder. The whole part times the position wraps modulo 2**32, that is,
  modulo one turn, without any rounding; the remainder (below 2**-33 turns a
  position) is added as a float. What is left is float32 rounding of an angle
  in [-pi, pi], about 2e-7, plus `position * 2**-58`.

  Args:
    positions_BT: int32; jit may trace it.
    rope: kind and constants (static under jit).
    head_dim: H, even (static under jit).

  Raises:
    ValueError: see `frequencies`.
  """
  freq_H, attention_factor = frequencies(rope, head_dim)
  turns_H = np.mod(freq_H / _TURN, 1.0)
  whole_H = np.rint(turns_H * 2.0**32)
  rest_H = (turns_H - whole_H * 2.0**-32) * _TURN
  step_H = jnp.asarray((whole_H % 2.0**32).astype(np.uint32))
  positions_BT1 = jnp.asarray(positions_BT, jnp.int32)[..., None]
  wrapped_BTH = positions_BT1.astype(jnp.uint32) * step_H[None, None]
  # Read as signed: the angle then lies in [-pi, pi) and keeps float32's bits.
  signed_BTH = jax.lax.bitcast_convert_type(wrapped_BTH, jnp.int32)
  angle_BTH = signed_BTH.astype(jnp.float32) * jnp.float32(_TURN * 2.0**-32)
  rest_11H = jnp.asarray(rest_H, jnp.float32)[None, None]
  angle_BTH += positions_BT1.astype(jnp.float32) * rest_11H
  scale = jnp.float32(attention_factor)
  return jnp.cos(angle_BTH) * scale, jnp.sin(angle_BTH) * scale


def apply_rope(
  x_BTNH: Float[Array, "B T N H"],
  cos_BTH: Float[Array, "B T H2"],
  sin_BTH: Float[Array, "B T H2"],
) -> Float[Array, "B T N H"]:
  """Rotates the pairs (i, i + H/2) of every head (Hugging Face's layout).

  Computed in float32, returned in the dtype of `x_BTNH`.

  Raises:
    ValueError: cos and sin are not `[B, T, H/2]`.
  """
  half = x_BTNH.shape[-1] // 2
  want = (*x_BTNH.shape[:2], half)
  if cos_BTH.shape != want or sin_BTH.shape != want:
    raise ValueError(
      f"cos {cos_BTH.shape} and sin {sin_BTH.shape} for x {x_BTNH.shape}; want"
      f" {want}."
    )
  x1_BTNH, x2_BTNH = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  cos_BT1H, sin_BT1H = cos_BTH[:, :, None], sin_BTH[:, :, None]
  y_BTNH = jnp.concatenate(
    [
      x1_BTNH * cos_BT1H - x2_BTNH * sin_BT1H,
      x2_BTNH * cos_BT1H + x1_BTNH * sin_BT1H,
    ],
    axis=-1,
  )
  return y_BTNH.astype(x_BTNH.dtype)


def trained_length(config: ModelConfig) -> int:
  """Positions the model was made for.

  `max_position_embeddings`, which is also where transformers' dynamic rule
  sets in; YaRN reaches `factor` times its original length where the config
  was left at that (Qwen's way of switching it on).
  """
  rope = config.rope
  if rope.kind == "yarn":
    reach = int(rope.original_max_positions * rope.factor)
    return max(config.max_positions, reach)
  return config.max_positions


def check_length(config: ModelConfig, length: int) -> None:
  """Refuses or warns about sequences longer than the model was made for.

  Args:
    config: the model.
    length: positions in one sequence (in one document where rows are packed).

  Raises:
    ValueError: `dynamic` scaling past the trained length.

  Warns (once a process and trained length): any other model.
  """
  limit = trained_length(config)
  if length <= limit:
    return
  if config.rope.kind == "dynamic":
    raise ValueError(
      f"rope_type='dynamic' is supported up to the trained length of {limit}"
      f" positions; got a sequence of {length}."
    )
  _warn_length(limit, length)


# Trained lengths already warned about.
_warned: set[int] = set()


def _warn_length(limit: int, length: int) -> None:
  if limit in _warned:
    return
  _warned.add(limit)
  warnings.warn(
    f"A sequence of {length} positions exceeds the {limit} that this model was"
    " trained for; expect worse predictions past them.",
    stacklevel=3,
  )
