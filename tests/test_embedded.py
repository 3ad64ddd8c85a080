"""The model that ships with the package has learnt something, and is small."""

import importlib.util
import math

import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax import data, evaluate, modules, paths, text_sources, weights
from wide_jax.tokenizers import load_tokenizer

MODEL = paths.EMBEDDED_MODEL
WINDOW = 256
LIMIT = 8 * 1000 * 1000


@pytest.fixture(scope="module")
def loaded():
  return weights.load_params("embedded", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
  return load_tokenizer("embedded")


@pytest.fixture(scope="module")
def bigram(repo):
  place = repo / "experiments" / "tiny_pretrained" / "bigram.py"
  spec = importlib.util.spec_from_file_location("bigram_baseline", place)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def windows_of(tokenizer, part):
  ids = data.text_ids(["embedded"], tokenizer, part=part)
  return data.eval_windows(ids, WINDOW)


def test_everything_embedded_fits_in_8_mb():
  sizes = {
    str(file.relative_to(paths.ASSETS)): file.stat().st_size
    for file in paths.ASSETS.rglob("*")
    if file.is_file()
  }
  assert "tiny_llama/model.safetensors" in sizes
  assert sum(sizes.values()) <= LIMIT, sizes


def test_shape_divides_by_two_and_holds_long_contexts(loaded):
  config = loaded.config
  assert config.n_heads % 2 == 0 and config.n_kv_heads % 2 == 0
  assert config.d_ff % 64 == 0  # two shards of groups of 32
  assert config.max_positions >= 1024
  assert config.tied


def test_tokenizer_ends_documents_and_starts_none(tokenizer, loaded):
  text = paths.EMBEDDED_TEXT.read_text("utf-8")[:5000] + "é 漢 \x00"
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.vocab == loaded.config.vocab
  assert tokenizer.bos_id is None and not tokenizer.add_bos
  assert tokenizer.eos_ids == (tokenizer.document_end_id,)
  assert tokenizer.eos_id not in ids
  assert tokenizer.token(tokenizer.eos_id) == "<|endoftext|>"


def test_half_the_perplexity_of_a_bigram(tokenizer, loaded, bigram):
  """On text that nothing was trained, chosen or stopped on."""
  documents = text_sources.embedded_documents("train")
  end = [tokenizer.document_end_id]
  stream = np.concatenate(
    [ids + end for ids in tokenizer.encode_batch(documents)]
  )
  baseline = bigram.Bigram(stream, tokenizer.vocab)
  settings = baseline.best_settings(windows_of(tokenizer, "calibration"))
  windows = windows_of(tokenizer, "evaluation")
  decoder = modules.Decoder(loaded.config)
  evaluator = evaluate.Evaluator(decoder, lambda batch: batch, None)
  batches = evaluate.window_batches(windows, 16)
  score = evaluator.score({"params": loaded.params}, None, batches)
  assert score.tokens == int(windows["weights"].sum()) > 10000
  base = math.exp(baseline.nll(windows, settings))
  assert score.ppl < 0.5 * base, f"{score.ppl} against {base}"


def test_bigram_is_a_distribution(bigram):
  rng = np.random.default_rng(17)
  vocab = 23
  stream = rng.integers(0, vocab - 1, 300)  # the last token never occurs
  model = bigram.Bigram(stream, vocab)
  v, w = np.indices((vocab, vocab))
  for lower in bigram.LOWER:
    probs = np.exp(model.log_probs(v, w, lower, 0.1, (0.8, 1.2, 1.6)))
    # A sum of `vocab` rounded terms.
    np.testing.assert_allclose(probs.sum(1), 1.0, rtol=vocab * 2.0**-52)


def test_transformers_loads_it(loaded, tokenizer):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    MODEL, dtype=torch.float32
  )
  their_tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
  text = text_sources.embedded_documents("evaluation")[0][:600]
  ids = tokenizer.encode(text)
  assert their_tokenizer(text).input_ids == ids
  assert their_tokenizer.eos_token_id == tokenizer.eos_id
  assert theirs.generation_config.eos_token_id == tokenizer.eos_id
  with torch.no_grad():
    want = theirs(torch.tensor([ids])).logits.numpy()
  got = modules.logits(loaded.config, loaded.params, jnp.array([ids]))
  # The limit that every dense parity test of the project holds.
  np.testing.assert_allclose(np.asarray(got), want, atol=1e-4, rtol=0)
