"""`ModelConfig.from_hf` against transformers, and back through `to_hf`."""

import pytest

from wide_jax.model_config import ModelConfig, RopeConfig

BASE = {
  "model_type": "llama",
  "vocab_size": 101,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}
LLAMA3 = {
  "factor": 32.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


def read(**changes) -> ModelConfig:
  return ModelConfig.from_hf({**BASE, **changes})


def theirs(**changes):
  transformers = pytest.importorskip("transformers")
  keys = {**BASE, **changes}
  return transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)


# --- rope --------------------------------------------------------------------


def test_a1_both_spellings_of_the_type():
  new = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
  old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
  v5 = read(
    rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
  )
  assert new.rope == old.rope == v5.rope
  assert new.rope == RopeConfig(
    theta=5e5,
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
  )


@pytest.mark.parametrize(
  "scaling, message",
  [
    ({"rope_type": "spiral"}, "spiral"),
    ({"type": "longrope", "factor": 2.0}, "longrope"),
    ({"rope_type": "divisors", "factor": 2.0}, "divisors"),
    ({"rope_type": "linear"}, r"'linear' lacks \['factor'\]"),
    ({"rope_type": "dynamic", "factor": None}, r"lacks \['factor'\]"),
    ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor"),
    ({"rope_type": "linear", "factor": "2"}, "'factor': '2'"),
    ({"rope_type": "linear", "factor": 0.5}, "0.5"),
    ({"rope_type": "linear", "factor": 2.0, "odd": 1}, "odd"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "0.5"),
  ],
)
def test_rope_that_is_refused(scaling, message):
  with pytest.raises(ValueError, match=message):
    read(rope_scaling=scaling)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
    # rope_scaling wins over rope_parameters where a file has both.
    {
      "rope_scaling": {"type": "linear", "factor": 2.0},
      "rope_parameters": {"rope_type": "default", "rope_theta": 7e4},
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {
      "rope_scaling": {"type": "yarn", "factor": None},
      "max_position_embeddings": 4096,
      "original_max_position_embeddings": 1024,
    },
    {
      "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.0,
      }
    },
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    # A length outside the block wins over the one inside.
    {
      "rope_scaling": {"rope_type": "llama3", **LLAMA3},
      "original_max_position_embeddings": 4096,
    },
    {
      "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
      "max_position_embeddings": 4096,
    },
  ],
)
def test_rope_means_what_transformers_means(changes):
  torch = pytest.importorskip("torch")
  del torch  # modeling code is imported only where torch is
  import numpy as np
  from transformers.models.llama import modeling_llama

  from wide_jax import rope

  config = theirs(**changes)
  rotary = modeling_llama.LlamaRotaryEmbedding(config)
  ours = read(**changes)
  frequencies, scale = rope.frequencies(ours.rope, ours.head_dim)[:2]
  np.testing.assert_allclose(
    np.asarray(frequencies), rotary.inv_freq.numpy(), rtol=1e-6
  )
  assert scale == pytest.approx(rotary.attention_scaling, rel=1e-6)


# --- shapes and switches -----------------------------------------------------


def test_a3_head_dim():
  assert read().head_dim == read(head_dim=None).head_dim == 16
  assert read(head_dim=32).head_dim == 32
  assert read(model_type="qwen3").head_dim == 128
  with pytest.raises(ValueError, match="num_attention_heads=4.*62"):
    read(hidden_size=62)


def test_kv_heads_null_is_all_and_absent_is_the_default():
  assert read(num_key_value_heads=None).n_kv_heads == 4
  absent = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
  assert ModelConfig.from_hf(absent).n_kv_heads == 4
  mistral = absent | {"model_type": "mistral", "num_attention_heads": 32}
  mistral["hidden_size"] = 128
  assert ModelConfig.from_hf(mistral).n_kv_heads == 8


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_are_those_of_transformers(kind):
  ours, hf = read(model_type=kind), theirs(model_type=kind)
  assert ours.max_positions == hf.max_position_embeddings
  assert ours.norm_eps == hf.rms_norm_eps
  assert ours.tied == hf.tie_word_embeddings
  assert ours.rope.theta == hf.rope_parameters["rope_theta"]
  window = hf.sliding_window if kind == "mistral" else 0
  assert ours.windows == (window,) * 3
  assert ours.qkv_bias == (kind == "qwen2")
  assert not ours.o_bias and not ours.mlp_bias
  assert ours.qk_norm == (kind == "qwen3")


def test_biases():
  llama = read(attention_bias=True, mlp_bias=True)
  assert llama.qkv_bias and llama.o_bias and llama.mlp_bias
  qwen2 = read(model_type="qwen2", attention_bias=False)
  assert qwen2.qkv_bias and not qwen2.o_bias
  mistral = read(model_type="mistral", attention_bias=True, mlp_bias=True)
  assert not (mistral.qkv_bias or mistral.o_bias or mistral.mlp_bias)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a6_windows(kind):
  def windows(**changes):
    return read(model_type=kind, **changes).windows

  assert windows(sliding_window=4) == (0, 0, 0)
  assert windows(sliding_window=4, use_sliding_window=False) == (0, 0, 0)
  on = {"sliding_window": 4, "use_sliding_window": True}
  assert windows(**on, max_window_layers=1) == (0, 4, 4)
  assert windows(**on) == (0, 0, 0)  # from layer 28 on
  types = ["sliding_attention", "full_attention", "sliding_attention"]
  assert windows(**on, layer_types=types) == (4, 0, 4)
  assert windows(use_sliding_window=True, max_window_layers=2) == (0, 0, 4096)
  with pytest.raises(ValueError, match="chunked_attention"):
    windows(**on, layer_types=["chunked_attention"] * 3)
  with pytest.raises(ValueError, match="2 layer_types.*3"):
    windows(**on, layer_types=types[:2])


def test_a6_mistral_and_llama_windows():
  assert read(model_type="mistral").windows == (4096,) * 3
  assert read(model_type="mistral", sliding_window=None).windows == (0, 0, 0)
  assert read(model_type="mistral", sliding_window=4).windows == (4, 4, 4)
  assert read(sliding_window=4, use_sliding_window=True).windows == (0, 0, 0)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model_type": "gpt2"}, "gpt2"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ({"vocab_size": "101"}, "vocab_size='101'"),
    ({"hidden_size": None}, "hidden_size=None"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True"),
    ({"num_key_value_heads": 3}, "n_kv_heads=3.*n_heads=4"),
    ({"partial_rotary_factor": 0.25}, "0.25"),
  ],
)
def test_what_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    read(**changes)


def test_missing_keys_are_named():
  with pytest.raises(
    ValueError, match=r"lacks \['hidden_size', 'vocab_size'\]"
  ):
    ModelConfig.from_hf(
      {k: v for k, v in BASE.items() if k not in ("vocab_size", "hidden_size")}
    )


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}},
    {"model_type": "mistral", "sliding_window": 4},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2", "head_dim": 8},
    {
      "model_type": "qwen3",
      "attention_bias": True,
      "use_sliding_window": True,
      "sliding_window": 4,
      "max_window_layers": 1,
    },
  ],
)
def test_to_hf_is_the_inverse(changes):
  ours = read(**changes)
  assert ModelConfig.from_hf(ours.to_hf()) == ours


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model_type": "mistral", "qkv_bias": True}, "mistral.*qkv_bias=True"),
    ({"o_bias": True}, "o_bias=True"),
    ({"qk_norm": True}, "qk_norm=True"),
    ({"windows": (0, 0, 4)}, r"windows=\(0, 0, 4\)"),
    (
      {"rope": RopeConfig(kind="divisors", divisors=(1.0,) * 8)},
      "rope divisors",
    ),
  ],
)
def test_to_hf_refuses_what_no_config_can_say(changes, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig(**(vars(read()) | changes)).to_hf()
