"""Rebuilds a tokenizer from the metadata of a GGUF file.

The pre-tokenizer, which decides where a text may be cut before any merge, is
taken from `tokenizer.ggml.pre`; a name that is not known here is refused, since
a guess gives other ids without any error. Format: the GGUF specification of
ggml, version 2 and 3, little-endian.
"""

import dataclasses
import mmap
import pathlib
import struct
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

# Token types of `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# --- reading metadata --------------------------------------------------------

_SCALARS = {
  0: "B",
  1: "b",
  2: "H",
  3: "h",
  4: "I",
  5: "i",
  6: "f",
  7: "?",
  10: "Q",
  11: "q",
  12: "d",
}
_STRING, _ARRAY = 8, 9


class _Cursor:
  """Walks over the key-value part of a GGUF file."""

  def __init__(self, view, path: pathlib.Path):
    self.view, self.at, self.path = view, 0, path

  def take(self, code: str, count: int = 1) -> tuple:
    layout = f"<{count}{code}"
    try:
      values = struct.unpack_from(layout, self.view, self.at)
    except struct.error as e:
      raise ValueError(f"{self.path}: the GGUF header is cut short.") from e
    self.at += struct.calcsize(layout)
    return values

  def string(self) -> bytes:
    (n,) = self.take("Q")
    end = self.at + n
    if end > len(self.view):
      raise ValueError(f"{self.path}: the GGUF header is cut short.")
    out = self.view[self.at : end]
    self.at = end
    return out

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.string().decode("utf-8", "replace")
    if kind == _ARRAY:
      (inner,), (n,) = self.take("I"), self.take("Q")
      if inner in _SCALARS:
        return list(self.take(_SCALARS[inner], n))
      return [self.value(inner) for _ in range(n)]
    if kind not in _SCALARS:
      raise ValueError(f"{self.path}: unknown GGUF value type {kind}.")
    return self.take(_SCALARS[kind])[0]


def read_metadata(path: str | pathlib.Path) -> dict[str, Any]:
  """All key-value pairs of a GGUF file, as Python values.

  Raises:
    ValueError: not a GGUF file, another version, or a truncated header.
  """
  path = pathlib.Path(path)
  with open(path, "rb") as f:
    if f.read(4) != b"GGUF":
      raise ValueError(f"{path} is not a GGUF file.")
    f.seek(0)
    with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
      cursor = _Cursor(view, path)
      cursor.at = 4
      (version,), (_, n_kv) = cursor.take("I"), cursor.take("Q", 2)
      if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version}; want 2 or 3.")
      out = {}
      for _ in range(n_kv):
        key = cursor.string().decode("utf-8", "replace")
        (kind,) = cursor.take("I")
        out[key] = cursor.value(kind)
  return out


# --- pre-tokenizers ----------------------------------------------------------

_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r"|\s+(?!\S)|\s+"
)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
  rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
  rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
  r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Pre:
  """One pre-tokenizer family: cuts by each pattern in turn."""

  patterns: tuple[str, ...]
  ignore_merges: bool = False  # a whole word of the vocabulary wins at once
  add_bos: bool = False  # where the file does not say
  nfc: bool = False


_FAMILIES = {
  _Pre((_GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion",
  # Every digit alone, then as GPT-2.
  _Pre((r"\p{N}", _GPT2)): (
    "smollm starcoder refact command-r codeshell exaone minerva-7b"
  ),
  _Pre((_LLAMA3,), ignore_merges=True, add_bos=True): (
    "llama-bpe llama3 llama-v3 falcon3"
  ),
  _Pre((_LLAMA3,)): "dbrx smaug-bpe",
  # Qwen's own tokenizers normalise to NFC before they cut.
  _Pre((_QWEN2,), nfc=True): "qwen2 deepseek-r1-qwen",
  _Pre((_QWEN2,)): "stablelm2",
  _Pre((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
  _Pre((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
}
PRE_TOKENIZERS = {n: pre for pre, v in _FAMILIES.items() for n in v.split()}


# --- building ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
  """What a GGUF file says about its tokenizer.

  `eos_ids` holds every end-of-generation id, the file's own eos first.
  """

  core: tokenizers.Tokenizer
  pre_tokenizer: str
  bos_id: int | None
  eos_ids: tuple[int, ...]
  add_bos: bool
  chat_template: str | None


# Control tokens that end a generation under these names in every model that
# has them; files often name only one of them as eos.
_END_NAMES = (
  "<|im_end|>",
  "<|eot_id|>",
  "<|eom_id|>",
  "<|end_of_text|>",
  "<|endoftext|>",
)


def read_tokenizer(path: str | pathlib.Path) -> GgufTokenizer:
  """Builds the tokenizer of a GGUF file.

  `tokenizer.ggml.add_bos_token` decides about the start token. Where it is
  absent: yes for the `llama` model and for the llama-bpe and tekken
  pre-tokenizers, no for every other (the rule of llama.cpp).

  Raises:
    ValueError: a key that is missing, or a tokenizer model or pre-tokenizer
      that is not known, by name.
  """
  meta = read_metadata(path)

  def get(key, default=None):
    return meta.get(f"tokenizer.ggml.{key}", default)

  kind, tokens = get("model"), get("tokens")
  if kind is None or not tokens:
    raise ValueError(f"{path} carries no tokenizer (tokenizer.ggml.tokens).")
  types = get("token_type") or [_NORMAL] * len(tokens)
  if len(types) != len(tokens):
    raise ValueError(f"{path}: {len(types)} token types, {len(tokens)} tokens.")
  if kind == "gpt2":
    name = get("pre", "default")
    if name not in PRE_TOKENIZERS:
      raise ValueError(
        f"{path}: unknown pre-tokenizer {name!r};"
        f" known are {sorted(PRE_TOKENIZERS)}."
      )
    pre = PRE_TOKENIZERS[name]
    if not get("merges"):
      raise ValueError(f"{path} lacks tokenizer.ggml.merges.")
    core = _byte_level(tokens, get("merges"), pre)
    bos, eos = get("bos_token_id"), get("eos_token_id")
    default_bos = pre.add_bos
    if get("pre") is None:
      name = "default (the file names none)"
  elif kind == "llama":
    name = "none (SentencePiece)"
    if len(get("scores") or ()) != len(tokens):
      raise ValueError(f"{path} lacks one tokenizer.ggml.scores a token.")
    core = _sentence_piece(
      tokens,
      get("scores"),
      types,
      unknown=get("unknown_token_id", 0),
      prefix=get("add_space_prefix", True),
    )
    bos, eos = get("bos_token_id", 1), get("eos_token_id", 2)
    default_bos = True
  else:
    raise ValueError(
      f"{path}: tokenizer model {kind!r} is not supported; want 'gpt2' (byte"
      " level) or 'llama' (SentencePiece)."
    )
  _add_special(core, tokens, types)
  add_bos = get("add_bos_token")
  if add_bos and bos is None:
    raise ValueError(f"{path}: add_bos_token is true, bos_token_id is absent.")
  if add_bos is None:
    add_bos = default_bos and bos is not None
  control = {t: i for i, t in enumerate(tokens) if types[i] == _CONTROL}
  ends = [eos, get("eot_token_id"), get("eom_token_id")]
  ends += [control.get(name) for name in _END_NAMES]
  return GgufTokenizer(
    core=core,
    pre_tokenizer=name,
    bos_id=bos,
    eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    add_bos=bool(add_bos),
    chat_template=meta.get("tokenizer.chat_template"),
  )


def _add_special(core, tokens, types) -> None:
  """Control tokens are never found in plain text, user-defined ones always."""
  for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    found = [
      tokenizers.AddedToken(token, special=special, normalized=False)
      for token, kind in zip(tokens, types, strict=True)
      if kind == wanted
    ]
    if found:
      (core.add_special_tokens if special else core.add_tokens)(found)


def _byte_level(tokens, merges, pre: _Pre) -> tokenizers.Tokenizer:
  # A merge is two tokens and a blank; a token may itself start with a blank.
  pairs = [(m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in merges]
  core = tokenizers.Tokenizer(
    models.BPE(
      {token: i for i, token in enumerate(tokens)},
      pairs,
      ignore_merges=pre.ignore_merges,
    )
  )
  if pre.nfc:
    core.normalizer = normalizers.NFC()
  cuts = [
    pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for pattern in pre.patterns
  ]
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
  core.decoder = decoders.ByteLevel()
  return core


def _sentence_piece(
  tokens, scores, types, *, unknown: int, prefix: bool
) -> tokenizers.Tokenizer:
  """SentencePiece BPE: the pair whose joined token scores best merges first.

  Control, byte and unused tokens cannot come out of a merge, so that text that
  merely looks like one stays text.
  """
  vocab = {token: i for i, token in enumerate(tokens)}
  ranked = []
  for i, token in enumerate(tokens):
    if types[i] != _NORMAL:
      continue
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in vocab and right in vocab:
        ranked.append((-scores[i], i, vocab[left], left, right))
  ranked.sort()
  core = tokenizers.Tokenizer(
    models.BPE(
      vocab,
      [(left, right) for *_, left, right in ranked],
      unk_token=tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  steps = [normalizers.Prepend("▁")] if prefix else []
  core.normalizer = normalizers.Sequence(
    [*steps, normalizers.Replace(" ", "▁")]
  )
  back = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if prefix:
    back.append(decoders.Strip(" ", 1, 0))
  core.decoder = decoders.Sequence(back)
  return core
