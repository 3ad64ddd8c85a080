"""Tokenises text once and keeps the ids on disk.

A cache entry is two files named by a key: `KEY.bin` (ids, document offsets,
and for chats one byte a token that says whether it is a target) and `KEY.json`.
The key hashes the content of the sources, the tokenizer and the settings, so an
entry is never stale. Both files are written under a temporary name and renamed,
the JSON last; two processes at once write the same bytes. An entry whose size
or checksum is wrong is made again.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import tqdm

from wide_jax import atomic, text_sources
from wide_jax.tokenizers import Tokenizer

_FORMAT = 1
_BATCH = 64  # documents a call: enough to keep the tokenizer's threads busy
_BATCH_CHARS = 4_000_000


@dataclasses.dataclass(frozen=True)
class TokenSet:
  """Documents as one flat run of token ids.

  Attributes:
    tokens: uint16 or uint32 [tokens], maybe memory-mapped; each document is
      its start token (where the model wants one), its text and its end token.
    offsets: int64 [documents + 1]; where each document starts, and the end.
    targets: bool [tokens] that marks what a chat's assistant has to produce,
      or None where every token is a target.
    vocab: number of ids the tokenizer has.
    report: what was read and dropped, in one line.
  """

  tokens: np.ndarray
  offsets: np.ndarray
  targets: np.ndarray | None
  vocab: int
  report: str = ""

  @property
  def documents(self) -> int:
    return len(self.offsets) - 1

  def document(self, i: int) -> np.ndarray:
    """The ids of document i."""
    return self.tokens[self.offsets[i] : self.offsets[i + 1]]


def load_tokens(
  names: Sequence[str],
  tokenizer: Tokenizer,
  *,
  cache_dir: str | os.PathLike | None = None,
  data_dir: str = "",
  text_key: str = "text",
  chat: bool = False,
  max_tokens: int = 0,
  part: str = "train",
  progress: bool = True,
) -> TokenSet:
  """Token ids of all documents of all sources, cached.

  A text document becomes `[start] text end`: the start token where the model
  wants one, the end token always (`Tokenizer.document_end_id`). A chat is laid
  out by the model's template, which ends each turn itself.

  Args:
    names: what `text_sources.resolve_sources` takes.
    tokenizer: how text becomes ids.
    cache_dir: where to keep the ids; None keeps them in memory only.
    data_dir: where relative paths start.
    text_key: column of the text; where `chat`, that of the messages, and the
      usual "text" then stands for "messages".
    chat: rows are lists of messages; only replies are targets.
    max_tokens: stop after so many tokens, the last document cut short and so
      without its end; 0 for all.
    part: the part of the embedded text that `embedded` means.
    progress: show a bar where standard error is a terminal.

  Raises:
    ValueError: a source that does not exist or has nothing usable, by name.
  """
  if chat and text_key == "text":
    text_key = "messages"
  sources = text_sources.resolve_sources(names, data_dir=data_dir, part=part)
  job = _Job(
    names=tuple(names),
    sources=sources,
    tokenizer=tokenizer,
    key=text_key,
    chat=chat,
    max_tokens=max_tokens,
    progress=progress,
  )
  if cache_dir is None:
    with tempfile.TemporaryFile() as f:
      meta = job.write(f)
      f.seek(0)
      return _unpack(np.frombuffer(f.read(), np.uint8), meta)
  folder = pathlib.Path(cache_dir)
  folder.mkdir(parents=True, exist_ok=True)
  base = folder / job.cache_key()
  found = _open_entry(base)
  if found is None:
    _write_entry(base, job)
    found = _open_entry(base)
  if found is None:
    raise ValueError(f"the token cache at {base}.bin cannot be read back.")
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
  """One set of sources to be tokenised in one way."""

  names: tuple[str, ...]
  sources: list[text_sources.Source]
  tokenizer: Tokenizer
  key: str
  chat: bool
  max_tokens: int
  progress: bool

  def cache_key(self) -> str:
    state = [
      _FORMAT,
      sys.byteorder,
      self.tokenizer.fingerprint,
      # A file's name matters only as far as it says how to read it.
      [(s.reader, s.content_hash(self.key)) for s in self.sources],
      self.key,
      self.chat,
      self.max_tokens,
    ]
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    return digest[:32]

  def write(self, f) -> dict:
    """Writes ids, offsets and targets to `f`; returns what describes them."""
    dtype = np.uint16 if self.tokenizer.vocab <= 2**16 else np.uint32
    report = text_sources.ReadReport()
    lengths, marks, total, checksum = [], bytearray(), 0, 0
    encode = self._encode_chats if self.chat else self._encode_texts
    bar = tqdm.tqdm(
      desc="tokenising",
      unit="tok",
      unit_scale=True,
      disable=None if self.progress else True,
    )
    with bar:
      for ids, targets in encode(report):
        if self.max_tokens:
          ids = ids[: self.max_tokens - total]
        block = np.asarray(ids, dtype).tobytes()
        f.write(block)
        checksum = zlib.crc32(block, checksum)
        if self.chat:
          marks += bytes(targets[: len(ids)])
        lengths.append(len(ids))
        total += len(ids)
        bar.update(len(ids))
        if self.max_tokens and total >= self.max_tokens:
          break
    if not lengths:
      raise ValueError(
        f"no usable text in {list(self.names)}: {report.summary()}."
      )
    pad = b"\0" * (-total * np.dtype(dtype).itemsize % 8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for block in (pad, offsets.tobytes(), bytes(marks)):
      f.write(block)
      checksum = zlib.crc32(block, checksum)
    return {
      "format": _FORMAT,
      "dtype": np.dtype(dtype).name,
      "tokens": total,
      "documents": len(lengths),
      "chat": self.chat,
      "vocab": self.tokenizer.vocab,
      "crc32": checksum,
      "sources": list(self.names),
      "tokenizer": self.tokenizer.name,
      "pre_tokenizer": self.tokenizer.pre_tokenizer,
      "report": report.summary(),
    }

  def _encode_texts(self, report) -> Iterator[tuple[list[int], None]]:
    tok = self.tokenizer
    start = [tok.bos_id] if tok.add_bos and tok.bos_id is not None else []
    end: list[int] = [tok.document_end_id]
    texts = text_sources.read_texts(self.sources, self.key, report)
    for batch in _batches(texts):
      for ids in tok.encode_batch(batch):
        yield start + ids + end, None

  def _encode_chats(self, report) -> Iterator[tuple[list[int], list[bool]]]:
    if self.tokenizer.chat_template is None:
      raise ValueError(
        f"data.chat needs a chat template, and {self.tokenizer.name} has none."
      )
    for source in self.sources:
      for value in source.rows(self.key):
        report.rows += 1
        try:
          messages = text_sources.messages_of(value)
          yield self.tokenizer.chat_targets(messages)
        except ValueError as e:  # a bad row, or one that the template refuses
          report.dropped[str(e)] += 1


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
  batch, chars = [], 0
  for text in texts:
    batch.append(text)
    chars += len(text)
    if len(batch) == _BATCH or chars > _BATCH_CHARS:
      yield batch
      batch, chars = [], 0
  if batch:
    yield batch


# --- entries on disk ---------------------------------------------------------


def _sizes(meta: dict) -> tuple[int, int, int]:
  """Bytes of the three sections, the first padded to a multiple of 8."""
  ids = meta["tokens"] * np.dtype(meta["dtype"]).itemsize
  marks = meta["tokens"] if meta["chat"] else 0
  return ids + -ids % 8, 8 * (meta["documents"] + 1), marks


def _unpack(raw: np.ndarray, meta: dict) -> TokenSet:
  ids, offsets, marks = _sizes(meta)
  return TokenSet(
    tokens=raw[:ids].view(meta["dtype"])[: meta["tokens"]],
    offsets=raw[ids : ids + offsets].view(np.int64),
    targets=raw[ids + offsets :].view(bool) if marks else None,
    vocab=meta["vocab"],
    report=meta["report"],
  )


def _open_entry(base: pathlib.Path) -> TokenSet | None:
  """The entry, or None where there is no whole one."""
  try:
    meta = json.loads(base.with_suffix(".json").read_text("utf-8"))
    raw = np.memmap(base.with_suffix(".bin"), np.uint8, mode="r")
    if meta["format"] != _FORMAT or len(raw) != sum(_sizes(meta)):
      return None
    checksum = 0
    for at in range(0, len(raw), 1 << 24):
      checksum = zlib.crc32(raw[at : at + (1 << 24)].data, checksum)
    return _unpack(raw, meta) if checksum == meta["crc32"] else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _write_entry(base: pathlib.Path, job: _Job) -> None:
  with atomic.replacing(base.with_suffix(".bin")) as temporary:
    with open(temporary, "wb") as f:
      meta = job.write(f)
  with atomic.replacing(base.with_suffix(".json")) as temporary:
    temporary.write_text(json.dumps(meta, indent=2), encoding="utf-8")
