"""Rotary frequencies and angles (trials A1, A2, A7, B1)."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax import rope as rope_lib
from wide_jax.model_config import ModelConfig, RopeConfig


def llama3(**kw):
  defaults = dict(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
    rope_theta=5e5,
  )
  return {"rope_parameters": {**defaults, **kw}}


def yarn(**kw):
  defaults = dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32768,
    rope_theta=1e6,
  )
  return {"rope_parameters": {**defaults, **kw}}


def model(rope, max_positions=64):
  return ModelConfig(
    vocab=11,
    d_model=8,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    d_ff=16,
    max_positions=max_positions,
    rope=rope,
  )


def close(got, want):
  # The trials print seven digits.
  np.testing.assert_allclose(got, want, rtol=5e-7)


def test_llama3_factor_32():
  rope = RopeConfig.from_hf(llama3())
  freq, scale = rope_lib.frequencies(rope, 64)
  base, _ = rope_lib.frequencies(RopeConfig(theta=5e5), 64)
  assert scale == 1.0 and freq.dtype == np.float64
  np.testing.assert_array_equal(freq[:15], base[:15])
  np.testing.assert_allclose(freq[18:], base[18:] / 32, rtol=1e-14)
  blended = freq[15:18]
  assert ((blended < base[15:18]) & (blended > base[15:18] / 32)).all()
  close(base[[15, 17, 31]], [2.131120e-3, 9.384739e-4, 3.013858e-6])
  close(freq[[15, 17, 31]], [1.290548e-3, 9.708288e-5, 9.418307e-8])


def test_llama3_factor_8():
  rope = RopeConfig.from_hf(llama3(factor=8.0))
  freq, _ = rope_lib.frequencies(rope, 128)
  base, _ = rope_lib.frequencies(RopeConfig(theta=5e5), 128)
  np.testing.assert_array_equal(freq[:29], base[:29])
  np.testing.assert_allclose(freq[35:], base[35:] / 8, rtol=1e-14)
  close([base[34], freq[34]], [9.384739e-4, 1.785078e-4])


def test_both_spellings_and_an_unknown_kind():
  new = llama3()
  old = {
    "rope_theta": 5e5,
    "rope_scaling": {
      "type": "llama3",
      "factor": 32.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    },
  }
  a, _ = rope_lib.frequencies(RopeConfig.from_hf(new), 64)
  b, _ = rope_lib.frequencies(RopeConfig.from_hf(old), 64)
  np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match="spiral"):
    RopeConfig.from_hf(llama3(rope_type="spiral"))


def test_yarn():
  freq, scale = rope_lib.frequencies(RopeConfig.from_hf(yarn()), 128)
  base, _ = rope_lib.frequencies(RopeConfig(theta=1e6), 128)
  np.testing.assert_array_equal(freq[:24], base[:24])
  np.testing.assert_allclose(freq[40:], base[40:] / 4, rtol=1e-14)
  close(base[[30, 63]], [1.539927e-3, 1.240938e-6])
  close(freq[[30, 63]], [1.064361e-3, 3.102344e-7])
  assert scale == pytest.approx(1.138629, abs=5e-7)
  plain = RopeConfig.from_hf(yarn(attention_factor=1.0))
  again, scale = rope_lib.frequencies(plain, 128)
  assert scale == 1.0
  np.testing.assert_array_equal(again, freq)


def test_yarn_factor_scales_cos_and_sin_everywhere():
  rope = RopeConfig.from_hf(yarn())
  cos, sin = rope_lib.cos_sin(np.arange(5, dtype=np.int32)[None], rope, 128)
  np.testing.assert_allclose(cos**2 + sin**2, 1.138629**2, rtol=1e-5)


def test_divisors_are_llama3_by_another_name():
  # Trial B1: what a GGUF file carries in rope_freqs.weight.
  want, _ = rope_lib.frequencies(RopeConfig.from_hf(llama3()), 64)
  base, _ = rope_lib.frequencies(RopeConfig(theta=5e5), 64)
  divisors = base / want
  assert (divisors[:15] == 1).all()
  assert divisors[15] == pytest.approx(1.6513, abs=5e-5)
  np.testing.assert_allclose(divisors[18:], 32)
  rope = RopeConfig(theta=5e5, kind="divisors", divisors=tuple(divisors))
  got, scale = rope_lib.frequencies(rope, 64)
  np.testing.assert_allclose(got, want, rtol=1e-14)
  assert scale == 1.0
  with pytest.raises(ValueError, match="32 rope divisors.*want 64"):
    rope_lib.frequencies(rope, 128)


@pytest.mark.parametrize(
  "parameters",
  [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    llama3()["rope_parameters"],
    llama3(factor=8.0)["rope_parameters"],
    yarn()["rope_parameters"],
    yarn(truncate=False)["rope_parameters"],
    yarn(beta_fast=16.0, beta_slow=2.0)["rope_parameters"],
    yarn(mscale=0.7, mscale_all_dim=1.3)["rope_parameters"],
    yarn(attention_factor=0.9)["rope_parameters"],
  ],
)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_equal_to_transformers(parameters, head_dim):
  llama = pytest.importorskip("transformers.models.llama.modeling_llama")
  from transformers import LlamaConfig

  config = LlamaConfig(
    hidden_size=4 * head_dim,
    num_attention_heads=4,
    head_dim=head_dim,
    max_position_embeddings=131072,
    rope_parameters=dict(parameters),
  )
  theirs = llama.LlamaRotaryEmbedding(config)
  rope = RopeConfig.from_hf(
    {"rope_parameters": parameters, "max_position_embeddings": 131072}
  )
  freq, scale = rope_lib.frequencies(rope, head_dim)
  # They compute in float32: exponent, power and quotient round once each, and
  # the rounded exponent costs ln(theta) * 2**-24 more.
  np.testing.assert_allclose(freq, theirs.inv_freq.numpy(), rtol=5e-6)
  assert scale == pytest.approx(float(theirs.attention_scaling), rel=1e-6)


@pytest.mark.parametrize("position", [0, 1, 4095, 131071, 2**31 - 1])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_angles_are_right_at_every_position(position, theta):
  rope = RopeConfig(theta=theta)
  fn = jax.jit(lambda p: rope_lib.cos_sin(p, rope, 128))
  cos, sin = fn(jnp.full((1, 1), position, jnp.int32))
  assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (1, 1, 64)
  freq, _ = rope_lib.frequencies(rope, 128)
  angle = position * freq
  # One rounding of an angle of up to pi, one of pi itself, cos and sin, and
  # `position * 2**-58` of the remainder; float64's own product adds
  # position * 2**-53.
  tol = 1e-6 + position * 2.0**-50
  np.testing.assert_allclose(cos[0, 0], np.cos(angle), atol=tol)
  np.testing.assert_allclose(sin[0, 0], np.sin(angle), atol=tol)
  if position == 4095:
    assert float(cos[0, 0, 0]) == pytest.approx(-0.0660, abs=5e-5)


def test_small_angles_keep_their_digits():
  # Position 1 at the slowest frequency: 1.2e-6 radians, relative error small.
  rope = RopeConfig(theta=1e6)
  _, sin = rope_lib.cos_sin(np.ones((1, 1), np.int32), rope, 128)
  np.testing.assert_allclose(
    sin[0, 0], np.sin(rope_lib.frequencies(rope, 128)[0]), rtol=1e-6
  )


def test_only_distances_matter():
  # Scores of positions 0.. and 3000.. agree, whatever the compute dtype of x.
  rope = RopeConfig(theta=1e6)
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 12, 2, 128))

  def scores(start):
    positions = start + jnp.arange(12, dtype=jnp.int32)[None]
    cos, sin = rope_lib.cos_sin(positions, rope, 128)
    a = rope_lib.apply_rope(q, cos, sin)
    b = rope_lib.apply_rope(k, cos, sin)
    return jnp.einsum("BTNH,BSNH->BNTS", a, b, precision="highest")

  # 128 products of size ~1 and angles good to 1e-6.
  np.testing.assert_allclose(scores(0), scores(3000), atol=1e-4)


def test_apply_rope_equals_transformers_layout():
  torch = pytest.importorskip("torch")
  llama = pytest.importorskip("transformers.models.llama.modeling_llama")
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  positions = np.asarray([[0, 1, 2, 3, 4], [7, 8, 0, 1, 2]], np.int32)
  cos, sin = rope_lib.cos_sin(positions, RopeConfig(), 8)
  got = rope_lib.apply_rope(jnp.asarray(x), cos, sin)
  twice = [torch.tensor(np.concatenate([t, t], -1)) for t in (cos, sin)]
  q = torch.tensor(x).transpose(1, 2)
  want, _ = llama.apply_rotary_pos_emb(q, q, *twice)
  np.testing.assert_allclose(got, want.transpose(1, 2).numpy(), atol=1e-6)


def test_apply_rope_in_bfloat16_rounds_once():
  x = jax.random.normal(jax.random.key(1), (1, 4, 2, 64)).astype(jnp.bfloat16)
  positions = jnp.asarray([[0, 4095, 131071, 5]], jnp.int32)
  cos, sin = rope_lib.cos_sin(positions, RopeConfig(theta=1e6), 64)
  got = rope_lib.apply_rope(x, cos, sin)
  want = rope_lib.apply_rope(x.astype(jnp.float32), cos, sin)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_apply_rope_refuses_other_shapes():
  x = jnp.zeros((1, 4, 2, 8))
  cos = jnp.zeros((1, 4, 8))  # of every channel, where pairs are wanted
  with pytest.raises(ValueError, match=r"\(1, 4, 8\).*want \(1, 4, 4\)"):
    rope_lib.apply_rope(x, cos, cos)


def test_dynamic_refuses_and_others_warn_once():
  dynamic = model(RopeConfig(kind="dynamic", factor=2.0))
  rope_lib.check_length(dynamic, 64)
  with pytest.raises(ValueError, match="dynamic.*64.*96"):
    rope_lib.check_length(dynamic, 96)
  rope_lib._warned.clear()
  plain = model(RopeConfig())
  rope_lib.check_length(plain, 64)
  with pytest.warns(UserWarning, match="65.*64"):
    rope_lib.check_length(plain, 65)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    rope_lib.check_length(plain, 66)
  rope_lib._warned.clear()


def test_yarn_reaches_factor_times_its_original_length():
  rope = RopeConfig.from_hf(yarn())
  assert rope_lib.trained_length(model(rope, 32768)) == 131072
  assert rope_lib.trained_length(model(rope, 262144)) == 262144


def test_dynamic_equals_transformers_up_to_the_trained_length():
  llama = pytest.importorskip("transformers.models.llama.modeling_llama")
  torch = pytest.importorskip("torch")
  from transformers import LlamaConfig

  parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
  config = LlamaConfig(
    hidden_size=64,
    num_attention_heads=2,
    max_position_embeddings=64,
    rope_parameters=dict(parameters),
  )
  theirs = llama.LlamaRotaryEmbedding(config)
  positions = torch.arange(64)[None]
  cos, _ = theirs(torch.zeros(1, 64, 64), positions)
  rope = RopeConfig.from_hf(
    {"rope_parameters": parameters, "max_position_embeddings": 64}
  )
  ours, _ = rope_lib.cos_sin(np.arange(64, dtype=np.int32)[None], rope, 32)
  # Their float32 angle at position 63 is off by up to 63 * 2**-24.
  np.testing.assert_allclose(ours, cos.numpy()[..., :16], atol=1e-5)
