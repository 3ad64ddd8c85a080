"""Tiny random checkpoints that transformers made, and its logits on them.

TL, TQ2, TQ3 and TM of the trials: nothing is a power of two on purpose, norms
are near 1 but not 1, biases are not zero, so that a tensor that is dropped
shows. torch is imported only here, and only when a fixture is used.
"""

import contextlib
import functools
import json
import pathlib

import numpy as np
import pytest

_TL = dict(
  vocab_size=101,
  hidden_size=72,
  intermediate_size=200,
  num_hidden_layers=2,
  num_attention_heads=9,
  num_key_value_heads=3,
  head_dim=8,
  max_position_embeddings=128,
  tie_word_embeddings=True,
)
SHAPES = {
  "TL": ("llama", _TL),
  "TQ2": (
    "qwen2",
    dict(
      vocab_size=101,
      hidden_size=56,
      intermediate_size=120,
      num_hidden_layers=2,
      num_attention_heads=14,
      num_key_value_heads=2,
      max_position_embeddings=128,
      tie_word_embeddings=False,
    ),
  ),
  "TQ3": (
    "qwen3",
    dict(
      vocab_size=101,
      hidden_size=40,
      intermediate_size=120,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=16,
      max_position_embeddings=128,
      tie_word_embeddings=False,
    ),
  ),
  "TM": (
    "mistral",
    _TL | dict(tie_word_embeddings=False, sliding_window=4),
  ),
}


@functools.cache
def torch_and_transformers():
  """The two modules, or a skip that says which one is missing."""
  torch = pytest.importorskip("torch", reason="torch is not installed")
  transformers = pytest.importorskip("transformers")
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  return torch, transformers


def make_model(name: str, seed: int = 0, **changes):
  """A random transformers model: float32, eager attention, evaluation mode.

  `changes` overwrite keys of its config.
  """
  torch, transformers = torch_and_transformers()
  kind, shape = SHAPES[name]
  config = transformers.AutoConfig.for_model(kind, **(shape | changes))
  config._attn_implementation = "eager"
  torch.manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.float32
  )
  with torch.no_grad():
    for key, value in model.named_parameters():
      if "norm" in key:
        value.copy_(1 + 0.2 * torch.randn_like(value))
      elif key.endswith("bias"):
        value.copy_(0.3 * torch.randn_like(value))
      else:  # larger than the default 0.02, so that logits differ clearly
        value.copy_(torch.randn_like(value) / value.shape[-1] ** 0.5)
  return model.eval()


def save_model(model, folder: pathlib.Path, shard_size: str = "1GB"):
  """Writes it as transformers does; returns the folder."""
  model.save_pretrained(folder, max_shard_size=shard_size)
  return folder


def make_dir(folder: pathlib.Path, name: str, seed: int = 0, **changes):
  """`make_model` written to `folder`; returns (folder, model)."""
  model = make_model(name, seed, **changes)
  return save_model(model, folder), model


def hf_logits(model, ids) -> np.ndarray:
  """float32 [B, T, V] of a transformers model."""
  torch, _ = torch_and_transformers()
  with torch.no_grad():
    out = model(torch.tensor(np.asarray(ids)), use_cache=False)
  return out.logits.float().numpy()


def read_hf(folder: pathlib.Path, **kwargs):
  """Loads a directory in transformers: float32, eager, and nothing amiss."""
  torch, transformers = torch_and_transformers()
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder,
    dtype=torch.float32,
    attn_implementation="eager",
    output_loading_info=True,
    **kwargs,
  )
  assert not any(info.values()), info
  return model.eval()


def random_ids(n_tokens: int = 12, batch: int = 2, vocab: int = 101, seed=1):
  """int32 [B, T]."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, vocab, (batch, n_tokens)).astype(np.int32)


@contextlib.contextmanager
def edited_config(folder: pathlib.Path):
  """`with edited_config(folder) as cfg`: changes config.json in place."""
  path = pathlib.Path(folder) / "config.json"
  config = json.loads(path.read_text())
  yield config
  path.write_text(json.dumps(config))


def assert_parity(ours, theirs, limit: float = 1e-4):
  """The trials' pass mark: largest difference, and the same argmax."""
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  assert ours.shape == theirs.shape
  worst = np.max(np.abs(ours - theirs))
  assert worst <= limit, f"logits differ by {worst}"
  np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
