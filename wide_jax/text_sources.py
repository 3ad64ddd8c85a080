"""Readers: files, directories, globs, data sets and the embedded text.

A document is one value of the text column (JSON lines, parquet, data sets), or
one whole `.txt` file. Rows that cannot be used are counted by reason and never
stop a run, unless nothing is left.
"""

import collections
import dataclasses
import glob
import gzip
import hashlib
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from wide_jax import paths

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
PARTS = ("train", "calibration", "evaluation")


@dataclasses.dataclass
class ReadReport:
  """How many rows were read, and why some were left out."""

  rows: int = 0
  dropped: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )

  @property
  def kept(self) -> int:
    return self.rows - self.dropped.total()

  def summary(self) -> str:
    """One line: `3 of 5 rows kept; dropped: empty 1, null 1`."""
    text = f"{self.kept} of {self.rows} rows kept"
    if self.dropped:
      reasons = ", ".join(f"{k} {n}" for k, n in sorted(self.dropped.items()))
      text += f"; dropped: {reasons}"
    return text


class BadRow(ValueError):
  """One row that cannot be used; the message is the reason that is counted."""


@dataclasses.dataclass(frozen=True)
class Source:
  """One place that yields documents.

  Attributes:
    kind: `file`, `hf` or `embedded`.
    place: the path, the name of the data set, or the part of the text.
  """

  kind: str
  place: str

  def rows(self, key: str) -> Iterator[Any]:
    """Yields the value of column `key` in every row, or a `BadRow`."""
    if self.kind == "embedded":
      yield from embedded_documents(self.place)
    elif self.kind == "hf":
      yield from _data_set_rows(self.place, key)
    else:
      yield from _file_rows(pathlib.Path(self.place), key)

  @property
  def reader(self) -> str:
    """How the source is read: a suffix of `SUFFIXES`, `hf` or `embedded`."""
    found = [x for x in SUFFIXES if self.place.endswith(x)]
    return found[0] if self.kind == "file" else self.kind

  def content_hash(self, key: str) -> str:
    """SHA-256 of what the source holds now."""
    if self.kind == "file":
      with open(self.place, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
    digest = hashlib.sha256()
    for value in self.rows(key):
      digest.update(json.dumps(value, default=str).encode() + b"\n")
    return digest.hexdigest()


def resolve_sources(
  names: Sequence[str], *, data_dir: str = "", part: str = "train"
) -> list[Source]:
  """Turns what a configuration names into sources, in a fixed order.

  Args:
    names: files, globs, directories (both in sorted order), data sets
      `hf:NAME[:CONFIG][:SPLIT]`, `embedded` or `embedded:PART`.
    data_dir: where relative paths start; "" for the working directory.
    part: the part of the embedded text that plain `embedded` stands for.

  Raises:
    ValueError: a path that does not exist, a directory or glob without text,
      a file of another kind; named.
  """
  out = []
  for name in names:
    if name == "embedded" or name.startswith("embedded:"):
      wanted = name.partition(":")[2] or part
      if wanted not in PARTS:
        raise ValueError(f"{name!r}: the parts of the text are {PARTS}.")
      out.append(Source("embedded", wanted))
    elif name.startswith("hf:"):
      out.append(Source("hf", name.removeprefix("hf:")))
    else:
      place = pathlib.Path(data_dir or ".") / pathlib.Path(name).expanduser()
      out += [Source("file", str(file)) for file in _files(place)]
  return out


def _files(place: pathlib.Path) -> list[pathlib.Path]:
  if place.is_file():
    if not place.name.endswith(SUFFIXES):
      raise ValueError(f"{place}: cannot read this kind; want {SUFFIXES}.")
    return [place]
  if place.is_dir():
    found = place.rglob("*")
  elif glob.has_magic(str(place)):
    found = map(pathlib.Path, glob.glob(str(place), recursive=True))
  else:
    raise ValueError(f"no text at {place}: it does not exist.")
  files = sorted(f for f in found if f.is_file() and f.name.endswith(SUFFIXES))
  if not files:
    raise ValueError(f"no text at {place}: no file there ends in {SUFFIXES}.")
  return files


# --- one file ----------------------------------------------------------------


def _file_rows(file: pathlib.Path, key: str) -> Iterator[Any]:
  try:
    if file.name.endswith(".txt"):
      yield file.read_text("utf-8-sig")
    elif file.name.endswith(".parquet"):
      yield from _parquet_rows(file, key)
    elif file.name.endswith(".gz"):
      with gzip.open(file, "rb") as f:
        yield from _json_rows(f, key)
    else:
      with open(file, "rb") as f:
        yield from _json_rows(f, key)
  except FileNotFoundError as e:
    raise ValueError(f"no text at {file}: it does not exist.") from e
  except UnicodeDecodeError as e:
    raise ValueError(f"{file} is not valid UTF-8: {e}") from e
  except (EOFError, OSError, zlib.error) as e:
    raise ValueError(f"{file} cannot be read: {e}") from e


def _json_rows(lines, key: str) -> Iterator[Any]:
  for number, line in enumerate(lines):
    if number == 0:
      line = line.removeprefix(b"\xef\xbb\xbf")
    if not line.strip():
      yield BadRow("blank line")
      continue
    try:
      row = json.loads(line)
    except UnicodeDecodeError:
      yield BadRow("not UTF-8")
      continue
    except (ValueError, RecursionError):
      yield BadRow("invalid JSON")
      continue
    if not isinstance(row, dict):
      yield BadRow("not an object")
    elif key not in row:
      yield BadRow(f"no {key!r}")
    else:
      yield row[key]


def _parquet_rows(file: pathlib.Path, key: str) -> Iterator[Any]:
  import pyarrow
  import pyarrow.parquet

  try:
    table = pyarrow.parquet.ParquetFile(file)
    names = table.schema_arrow.names
    if key not in names:
      raise ValueError(f"{file} has no column {key!r}; it has {names}.")
    for batch in table.iter_batches(batch_size=256, columns=[key]):
      yield from batch.column(0).to_pylist()
  except pyarrow.ArrowInvalid as e:
    raise ValueError(f"{file} cannot be read: {e}") from e


# --- data sets ---------------------------------------------------------------

_SPLIT = re.compile(r"(train|test|validation|valid|val|dev)\b.*")


def parse_data_set(name: str) -> tuple[str, str | None, str]:
  """Splits `NAME[:CONFIG][:SPLIT]`; the split is `train` unless given.

  One part after the name is a split where it begins with a usual name of one
  (`train`, `test`, `validation`, `valid`, `val`, `dev`), else a configuration;
  `NAME::SPLIT` always gives a split. Slices such as `train[:10%]` work.
  """
  parts = re.split(r":(?![^\[]*\])", name)
  if not parts[0] or len(parts) > 3:
    raise ValueError(f"'hf:{name}' must read 'hf:NAME[:CONFIG][:SPLIT]'.")
  if len(parts) == 2 and _SPLIT.fullmatch(parts[1]):
    parts = [parts[0], "", parts[1]]
  place, config, split = (*parts, "", "")[:3]
  return place, config or None, split or "train"


def _data_set_rows(name: str, key: str) -> Iterator[Any]:
  import datasets

  place, config, split = parse_data_set(name)
  path = pathlib.Path(place).expanduser()
  saved = any((path / f).exists() for f in ("state.json", "dataset_dict.json"))
  try:
    if saved:
      found = datasets.load_from_disk(str(path))
      if isinstance(found, datasets.DatasetDict):
        if split not in found:
          raise ValueError(f"no split {split!r}; it has {sorted(found)}")
        found = found[split]
    else:
      found = datasets.load_dataset(place, config, split=split)
  except Exception as e:  # the library raises many unrelated types
    reason = str(e).strip().splitlines()[:1]
    raise ValueError(f"'hf:{name}' cannot be loaded: {reason}") from e
  if key not in found.column_names:
    raise ValueError(
      f"'hf:{name}' has no column {key!r}; it has {found.column_names}."
    )
  for row in found.select_columns([key]):
    yield row[key]


# --- the embedded text -------------------------------------------------------

_BYLINE = "by William Shakespeare"
_SCENE = re.compile(r"^(?:ACT [IVX]+\.\s+)?SCENE [IVX]+\.", re.I | re.M)


def embedded_plays() -> list[str]:
  """The plays of the text that ships with this package, titles included."""
  text = paths.EMBEDDED_TEXT.read_text("utf-8")
  starts = []
  for found in re.finditer(re.escape(_BYLINE), text):
    title_end = len(text[: found.start()].rstrip())
    starts.append(text.rfind("\n", 0, title_end) + 1)
  return [
    text[a:b].strip() + "\n"
    for a, b in zip(starts, [*starts[1:], len(text)], strict=True)
  ]


def embedded_documents(part: str) -> list[str]:
  """Documents of one part of the embedded text.

  Of every play the first 90% (in characters, up to the next end of a speech)
  are `train`, the next 5% `calibration`, the last 5% `evaluation`; each part is
  cut into documents where a scene begins.
  """
  out = []
  for play in embedded_plays():
    edges = [0]
    for share in (0.90, 0.95):
      edges.append(play.index("\n\n", int(share * len(play))) + 2)
    edges.append(len(play))
    i = PARTS.index(part)
    piece = play[edges[i] : edges[i + 1]]
    starts = [0, *(m.start() for m in _SCENE.finditer(piece)), len(piece)]
    scenes = [piece[a:b].strip() for a, b in itertools.pairwise(starts)]
    out += [scene + "\n" for scene in scenes if scene]
  return out


# --- checked rows ------------------------------------------------------------


def text_of(value: Any) -> str:
  """The text of a row.

  Raises:
    BadRow: with the reason.
  """
  if isinstance(value, BadRow):
    raise value
  if value is None:
    raise BadRow("null")
  if not isinstance(value, str):
    raise BadRow("not a string")
  if not value:
    raise BadRow("empty")
  if value.isspace():
    raise BadRow("only whitespace")
  try:
    value.encode()
  except UnicodeEncodeError:
    raise BadRow("half a surrogate pair") from None
  return value


def messages_of(value: Any) -> list[dict]:
  """The messages of a chat row.

  Raises:
    BadRow: with the reason.
  """
  if isinstance(value, BadRow):
    raise value
  if value is None:
    raise BadRow("null")
  if not isinstance(value, (list, tuple)):
    raise BadRow("not a list of messages")
  if not value:
    raise BadRow("empty")
  for message in value:
    if not isinstance(message, dict):
      raise BadRow("a message that is not an object")
    if not isinstance(message.get("role"), str):
      raise BadRow("a message without a role")
    if not isinstance(message.get("content"), str):
      raise BadRow("a message whose content is not a string")
    try:
      (message["role"] + message["content"]).encode()
    except UnicodeEncodeError:
      raise BadRow("half a surrogate pair") from None
  if not any(m["role"] == "assistant" and m["content"].strip() for m in value):
    raise BadRow("no assistant reply")
  return list(value)


def read_texts(
  sources: Sequence[Source], key: str, report: ReadReport
) -> Iterator[str]:
  """Yields every usable text; counts the others in `report`."""
  for source in sources:
    for value in source.rows(key):
      report.rows += 1
      try:
        text = text_of(value)
      except BadRow as e:
        report.dropped[str(e)] += 1
      else:
        yield text
