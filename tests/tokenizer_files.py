"""Small tokenizers and GGUF files that the tests make for themselves."""

import json
import pathlib

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>")

TEXT = [
  "Hello there, it's 12345 o'clock; naïve café\n\n  x and  1,234.5 (or ¼)",
  "We'll say: HELLO World, hello world! don't DON'T\r\n\ttabs\n\n\n",
  "The year 2024   had 366 days ... and 52 weeks; 7 days a week. 3rd £5 €6",
  "for (int i=0; i<10; ++i) { a[i] += b[i]; }  // comment\n    return 0;",
  "Ünïcödé здравствуй мир 你好 世界 １２３ \U0001f44d\U0001f3fd ok",
] * 3


def trained(pre, *, normalizer=None, vocab=600, special=SPECIAL, **model):
  """A byte-level BPE trained on `TEXT`, cut by `pre`."""
  core = tokenizers.Tokenizer(models.BPE(**model))
  if normalizer:
    core.normalizer = normalizer
  core.pre_tokenizer = pre
  core.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab,
    special_tokens=list(special),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  core.train_from_iterator(TEXT, trainer)
  return core


def gpt2(**kwargs):
  """The usual small tokenizer of these tests."""
  return trained(pre_tokenizers.ByteLevel(add_prefix_space=False), **kwargs)


def write_directory(folder: pathlib.Path, core, **settings) -> pathlib.Path:
  """A Hugging Face directory with tokenizer.json and tokenizer_config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  core.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  return folder


def write_gguf(
  file: pathlib.Path, core, pre: str | None, add_bos=None, template=None, **ids
) -> pathlib.Path:
  """A GGUF file with a byte-level tokenizer and no tensors."""
  state = json.loads(core.to_str())
  vocab = sorted(core.get_vocab(), key=core.get_vocab().get)
  special = {t["content"] for t in state["added_tokens"] if t["special"]}
  writer = gguf.GGUFWriter(str(file), "llama")
  writer.add_tokenizer_model("gpt2")
  if pre is not None:
    writer.add_tokenizer_pre(pre)
  writer.add_token_list(vocab)
  writer.add_token_types([3 if t in special else 1 for t in vocab])
  merges = state["model"]["merges"]
  writer.add_token_merges(
    [m if isinstance(m, str) else " ".join(m) for m in merges]
  )
  if add_bos is not None:
    writer.add_add_bos_token(add_bos)
  if template is not None:
    writer.add_chat_template(template)
  for key, value in ids.items():
    writer.add_uint32(f"tokenizer.ggml.{key}", value)
  return _close(writer, file)


def write_sentence_piece(file: pathlib.Path, pieces, **flags) -> pathlib.Path:
  """A GGUF file of model `llama`; `pieces` are (token, score, type)."""
  writer = gguf.GGUFWriter(str(file), "llama")
  writer.add_tokenizer_model("llama")
  writer.add_token_list([p[0] for p in pieces])
  writer.add_token_scores([p[1] for p in pieces])
  writer.add_token_types([p[2] for p in pieces])
  for key, value in flags.items():
    writer.add_bool(f"tokenizer.ggml.{key}", value)
  return _close(writer, file)


def _close(writer, file):
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return file


def split(pattern: str):
  """A pre-tokenizer as tokenizer.json files of this kind spell it."""
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def nfc():
  return normalizers.NFC()
