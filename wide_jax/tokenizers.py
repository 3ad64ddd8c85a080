"""Text to token ids and back, for every kind of model this project reads.

One rule holds for all of them: **text is text.** `encode` never adds a start or
end token, and what merely looks like a control token (`<|im_end|>` typed into a
document) is encoded as the characters it is made of. Control tokens come from
two places only: the document boundaries that `data.py` writes, and the chat
template. Tokens that a tokenizer declares as ordinary added vocabulary (not
"special", `user_defined` in GGUF) are part of its language and stay what they
are.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import tokenizers

from wide_jax import chat, gguf_tokenizer, paths
from wide_jax.safetensors_io import read_json

# Names under which models carry their end-of-text token, as opposed to the end
# of a chat turn; the first that is a control token of the vocabulary is used.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

# What slow tokenizers keep their vocabulary in.
_VOCABULARIES = ("vocab.json", "tokenizer.model", "tekken.json", "vocab.txt")


class Tokenizer:
  """A tokenizer and what its model wants around a text.

  Attributes:
    name: where it came from.
    vocab: number of ids, 1 + the largest.
    bos_id: the start token, or None.
    add_bos: whether the model wants the start token before a text.
    eos_ids: every id that ends a generation: the union of all sources.
    pre_tokenizer: what cuts the text before any merge, in words.
    chat_template: the Jinja source, or None for a base model.
  """

  def __init__(
    self,
    core: tokenizers.Tokenizer,
    *,
    name: str,
    pre_tokenizer: str,
    bos_id: int | None = None,
    add_bos: bool = False,
    eos_ids: Sequence[int] = (),
    chat_template: str | None = None,
  ):
    # A file may carry a length to cut or pad at; lengths are ours to set.
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = True
    self._core = core
    self.name = name
    self.pre_tokenizer = pre_tokenizer
    self.bos_id = bos_id
    self.add_bos = add_bos
    self.chat_template = chat_template
    self.special = {
      token.content: i
      for i, token in core.get_added_tokens_decoder().items()
      if token.special
    }
    self.vocab = 1 + max(core.get_vocab(with_added_tokens=True).values())
    end = next(
      (self.special[t] for t in _DOCUMENT_ENDS if t in self.special), None
    )
    ends = [*eos_ids, *(() if end is None else (end,))]
    self.eos_ids = tuple(dict.fromkeys(ends))
    self._document_end = end

  @property
  def eos_id(self) -> int:
    """The model's own end token.

    Raises:
      ValueError: the tokenizer has none.
    """
    if not self.eos_ids:
      raise ValueError(f"the tokenizer of {self.name} has no end token.")
    return self.eos_ids[0]

  @property
  def document_end_id(self) -> int:
    """The token that ends a document in training text.

    `<|endoftext|>`, `<|end_of_text|>`, `</s>` or `<eos>` where it is a control
    token of the vocabulary (chat models name the end of a turn as their eos),
    else `eos_id`.
    """
    return self.eos_id if self._document_end is None else self._document_end

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 over everything that decides which ids a text becomes."""
    state = [
      self._core.to_str(),
      self.bos_id,
      self.add_bos,
      self.eos_ids,
      self.chat_template,
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, with nothing added."""
    return self._core.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """`encode` of every text."""
    found = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
    return [one.ids for one in found]

  def decode(self, ids: Iterable[SupportsIndex]) -> str:
    """The text of `ids`, control tokens included.

    Ids that no token has (rows that pad an embedding table) decode to nothing.
    """
    known = [i for i in map(int, ids) if 0 <= i < self.vocab]
    return self._core.decode(known, skip_special_tokens=False)

  def token(self, i: SupportsIndex) -> str:
    """The token with id `i` as the vocabulary spells it; "" if unknown."""
    return self._core.id_to_token(int(i)) or ""

  # --- chats -----------------------------------------------------------------

  @functools.cached_property
  def _chat(self) -> chat.ChatEncoder:
    if self.chat_template is None:
      raise ValueError(
        f"{self.name} has no chat template; give the prompt as plain text or"
        " use a model that was tuned for chats."
      )
    return chat.ChatEncoder(
      self._core,
      self.chat_template,
      special=self.special,
      bos_id=self.bos_id,
      add_bos=self.add_bos,
      eos_ids=self.eos_ids,
      tokens={
        "bos_token": "" if self.bos_id is None else self.token(self.bos_id),
        "eos_token": self.token(self.eos_ids[0]) if self.eos_ids else "",
      },
    )

  def apply_chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
  ) -> list[int]:
    """The ids of a conversation, as the model's chat template lays it out.

    Text inside a message never becomes a control token. Exactly one start token
    stands at the front where the template or the model wants one.

    Args:
      messages: mappings with at least `role` and `content`.
      add_generation_prompt: end with the header of the assistant's reply; warns
        where the template ignores this.

    Raises:
      ValueError: no template, or the template refuses the messages.
    """
    return self._chat.encode(messages, add_generation_prompt)

  def chat_targets(
    self, messages: Sequence[Mapping[str, Any]]
  ) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and which of them an assistant has to produce.

    True marks the tokens of the assistant's replies up to and with the token
    that ends the turn.

    Raises:
      ValueError: no template, no reply to learn, or a template that does not
        let one tell where a reply begins.
    """
    return self._chat.encode_targets(messages)


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
  """Reads the tokenizer of a model.

  Args:
    path: a Hugging Face directory, a `tokenizer.json`, a `.gguf` file, or
      whatever else `paths.resolve_model_path` takes.

  Raises:
    ValueError: there is none, or it is of a kind that is not supported.
  """
  place = paths.resolve_model_path(str(path))
  if place.suffix == ".gguf":
    found = gguf_tokenizer.read_tokenizer(place)
    return Tokenizer(
      found.core,
      name=str(path),
      pre_tokenizer=found.pre_tokenizer,
      bos_id=found.bos_id,
      add_bos=found.add_bos,
      eos_ids=found.eos_ids,
      chat_template=found.chat_template,
    )
  if place.name == "tokenizer.json":
    place = place.parent
  if not place.is_dir():
    raise ValueError(
      f"{path}: want a directory with tokenizer.json, or a .gguf file."
    )
  return _from_directory(place, str(path))


# --- Hugging Face directories ------------------------------------------------


def _from_directory(place: pathlib.Path, name: str) -> Tokenizer:
  settings = _read_json(place / "tokenizer_config.json")
  core = _read_core(place)
  _add_declared_tokens(core, settings, place)
  bos_id = _token_id(core, settings.get("bos_token"), place, "bos_token")
  eos_id = _token_id(core, settings.get("eos_token"), place, "eos_token")
  ends = [] if eos_id is None else [eos_id]
  for file in ("generation_config.json", "config.json"):
    ids = _read_json(place / file).get("eos_token_id")
    ends += ids if isinstance(ids, list) else [] if ids is None else [ids]
  add_bos = settings.get("add_bos_token")
  if add_bos is None:
    # The file's own post-processor says what stands before a text.
    first = core.encode("a", add_special_tokens=True).ids[:1]
    add_bos = bos_id is not None and first == [bos_id]
  if add_bos and bos_id is None:
    raise ValueError(f"{place}: add_bos_token is true, bos_token is absent.")
  return Tokenizer(
    core,
    name=name,
    pre_tokenizer=_describe(json.loads(core.to_str())["pre_tokenizer"]),
    bos_id=bos_id,
    add_bos=add_bos,
    eos_ids=ends,
    chat_template=_chat_template(place, settings),
  )


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  return read_json(file) if file.exists() else {}


def _read_core(place: pathlib.Path) -> tokenizers.Tokenizer:
  file = place / "tokenizer.json"
  if file.exists():
    try:
      return tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises plain Exception
      raise ValueError(f"{file} cannot be read: {e}") from e
  if not any((place / name).exists() for name in _VOCABULARIES):
    # transformers would make a tokenizer of nothing, and encode to nothing.
    raise ValueError(
      f"{place} has no tokenizer: none of tokenizer.json,"
      f" {', '.join(_VOCABULARIES)} is there."
    )
  try:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(place).backend_tokenizer
  except Exception as e:  # ImportError, OSError, ValueError, AttributeError
    reason = (str(e) or type(e).__name__).splitlines()[0]
    raise ValueError(
      f"{place} has no tokenizer.json, and transformers cannot make one from"
      f" what is there: {reason}"
    ) from e


def _add_declared_tokens(core, settings, place) -> None:
  """Adds tokens that only tokenizer_config.json knows, at the ids it states."""
  declared = settings.get("added_tokens_decoder") or {}
  for i, entry in sorted(declared.items(), key=lambda item: int(item[0])):
    content = entry["content"]
    if core.token_to_id(content) is None:
      token = tokenizers.AddedToken(
        content,
        single_word=entry.get("single_word", False),
        lstrip=entry.get("lstrip", False),
        rstrip=entry.get("rstrip", False),
        normalized=entry.get("normalized", False),
        special=entry.get("special", False),
      )
      add = core.add_special_tokens if token.special else core.add_tokens
      add([token])
    if core.token_to_id(content) != int(i):
      raise ValueError(
        f"{place}: tokenizer_config.json puts {content!r} at {i},"
        f" tokenizer.json at {core.token_to_id(content)}."
      )


def _token_id(core, token, place, key) -> int | None:
  if isinstance(token, Mapping):
    token = token.get("content")
  if not token:
    return None
  i = core.token_to_id(token)
  if i is None:
    raise ValueError(f"{place}: {key} {token!r} is not in the vocabulary.")
  return i


def _chat_template(place: pathlib.Path, settings) -> str | None:
  file = place / "chat_template.jinja"
  if file.exists():
    return file.read_text("utf-8")
  found = settings.get("chat_template")
  if isinstance(found, list):  # several, by name
    found = {t.get("name"): t.get("template") for t in found}.get("default")
  return found


def _describe(state: Mapping[str, Any] | None) -> str:
  """A pre-tokenizer's JSON in a few words: `Digits + ByteLevel`."""
  if state is None:
    return "none"
  if state["type"] == "Sequence":
    return " + ".join(_describe(s) for s in state["pretokenizers"])
  if state["type"] == "Split" and "Regex" in state.get("pattern", {}):
    return f"Split({state['pattern']['Regex']})"
  return state["type"]
