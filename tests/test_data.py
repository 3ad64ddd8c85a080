"""Sources, the token cache, rows, batches and windows (trials E1, G1, G2)."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tokenizer_files as files

from wide_jax import data, text_sources, token_cache
from wide_jax.tokenizers import load_tokenizer

CHAT = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return files.write_directory(
    tmp_path_factory.mktemp("tokenizer"),
    files.gpt2(),
    eos_token="<|im_end|>",
    chat_template=CHAT,
  )


@pytest.fixture(scope="module")
def tok(folder):
  return load_tokenizer(folder)


def token_set(*documents, targets=None):
  """A token set of documents given as lists of ids (end tokens included)."""
  lengths = [len(d) for d in documents]
  return data.TokenSet(
    tokens=np.concatenate([np.asarray(d, np.uint16) for d in documents]),
    offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    targets=None if targets is None else np.concatenate(targets).astype(bool),
    vocab=1000,
  )


def write_jsonl(file, rows):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  file.write_text("\n".join(lines) + "\n", "utf-8")
  return file


def read(names, key="text", **kwargs):
  report = text_sources.ReadReport()
  sources = text_sources.resolve_sources([str(n) for n in names], **kwargs)
  return list(text_sources.read_texts(sources, key, report)), report


# --- rows nobody expects (G2) ------------------------------------------------

LONG = "a" * 1_000_000
GOOD = ["x", LONG, "nul \0 inside", "a literal <|endoftext|> in text"]


@pytest.fixture
def odd_rows(tmp_path):
  rows = [{"text": ""}, {"text": " \n\t "}, {"text": None}, {"other": "x"}]
  rows += [{"text": 7}, [1], "{broken", '{"text": "\\ud800"}', ""]
  return write_jsonl(tmp_path / "odd.jsonl", rows + [{"text": t} for t in GOOD])


def test_odd_rows_are_counted_by_reason(odd_rows):
  texts, report = read([odd_rows])
  assert texts == GOOD
  assert report.dropped == {
    "empty": 1,
    "only whitespace": 1,
    "null": 1,
    "no 'text'": 1,
    "not a string": 1,
    "not an object": 1,
    "invalid JSON": 1,
    "half a surrogate pair": 1,
    "blank line": 1,
  }
  assert (report.rows, report.kept) == (13, 4)
  assert "4 of 13 rows kept; dropped: blank line 1, empty 1" in report.summary()


def test_odd_rows_become_tokens(odd_rows, tok):
  got = data.load_tokens([str(odd_rows)], tok)
  assert got.documents == 4
  assert "4 of 13 rows kept" in got.report
  for i, text in enumerate(GOOD):
    document = got.document(i)
    assert document[-1] == tok.document_end_id
    assert list(document[:-1]) == tok.encode(text)
    # A literal control token in the text is not one.
    assert tok.document_end_id not in document[:-1]
  assert "4 documents" in data.describe(got, data.Rows(got, 64))


def test_a_set_without_anything_usable_is_refused(tmp_path, tok):
  file = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"x": 1}])
  with pytest.raises(
    ValueError, match="a.jsonl.*dropped: empty 1, no 'text' 1"
  ):
    data.load_tokens([str(file)], tok, cache_dir=tmp_path / "cache")
  assert os.listdir(tmp_path / "cache") == []
  with pytest.raises(ValueError, match="no usable text"):
    data.read_text([str(file)])


# --- sources -----------------------------------------------------------------


def test_every_kind_of_file(tmp_path):
  import pyarrow
  import pyarrow.parquet

  (tmp_path / "sub").mkdir()
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwhole file\n\nis one")
  write_jsonl(tmp_path / "b.jsonl", [{"text": "b1"}, {"text": "b2"}])
  with gzip.open(tmp_path / "sub" / "c.jsonl.gz", "wt") as f:
    f.write('{"text": "c"}\n')
  table = pyarrow.table({"text": ["d1", None], "n": [1, 2]})
  pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
  (tmp_path / "ignored.md").write_text("no")
  want = ["whole file\n\nis one", "b1", "b2", "d1", "c"]
  assert read([tmp_path])[0] == want
  assert read([tmp_path / "*.jsonl"])[0] == ["b1", "b2"]
  assert read([tmp_path / "**" / "*.jsonl*"])[0] == ["b1", "b2", "c"]
  assert read(["sub"], data_dir=str(tmp_path))[0] == ["c"]
  assert read([tmp_path / "d.parquet", tmp_path / "b.jsonl"])[0] == [
    "d1",
    "b1",
    "b2",
  ]
  with pytest.raises(ValueError, match=r"no column 'body'; it has \['text'"):
    read([tmp_path / "d.parquet"], key="body")


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("nowhere.jsonl", "no text at .*nowhere.jsonl: it does not exist"),
    ("*.nothing", r"no text at .*\*.nothing: no file there ends in"),
    ("empty", "no text at .*empty: no file there ends in"),
    ("x.csv", "x.csv: cannot read this kind"),
    ("embedded:middle", "the parts of the text are"),
    ("hf:a:b:c:d", r"must read 'hf:NAME\[:CONFIG\]\[:SPLIT\]'"),
    ("cut.jsonl.gz", "cut.jsonl.gz cannot be read"),
    ("flipped.jsonl.gz", "flipped.jsonl.gz cannot be read"),
    ("bad.parquet", "bad.parquet cannot be read"),
    ("latin.txt", "latin.txt is not valid UTF-8"),
  ],
)
def test_sources_that_cannot_be_read(tmp_path, name, message):
  (tmp_path / "empty").mkdir()
  (tmp_path / "x.csv").write_text("a,b")
  packed = gzip.compress(b'{"text": "something long enough"}\n' * 50)
  (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
  flipped = bytearray(packed)
  flipped[20:30] = b"\xff" * 10
  (tmp_path / "flipped.jsonl.gz").write_bytes(bytes(flipped))
  (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
  (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
  with pytest.raises(ValueError, match=message):
    read([name], data_dir=str(tmp_path))


def test_data_sets_on_disk(tmp_path):
  datasets = pytest.importorskip("datasets")
  rows = datasets.Dataset.from_dict({"text": ["one", "", "two"]})
  rows.save_to_disk(str(tmp_path / "plain"))
  both = datasets.DatasetDict({"train": rows, "test": rows.select([2])})
  both.save_to_disk(str(tmp_path / "split"))
  assert read([f"hf:{tmp_path}/plain"])[0] == ["one", "two"]
  assert read([f"hf:{tmp_path}/split:test"])[0] == ["two"]
  assert read([f"hf:{tmp_path}/split"])[1].dropped == {"empty": 1}
  with pytest.raises(ValueError, match="no split 'dev'"):
    read([f"hf:{tmp_path}/split:dev"])
  with pytest.raises(ValueError, match="no column 'body'"):
    read([f"hf:{tmp_path}/plain"], key="body")
  # A folder of plain files, as the library reads it.
  (tmp_path / "files").mkdir()
  write_jsonl(tmp_path / "files" / "train.jsonl", [{"text": "three"}])
  assert read([f"hf:{tmp_path}/files"])[0] == ["three"]
  with pytest.raises(ValueError, match="'hf:no/such' cannot be loaded"):
    read(["hf:no/such"])


@pytest.mark.parametrize(
  ("name", "want"),
  [
    ("a/b", ("a/b", None, "train")),
    ("a/b:en", ("a/b", "en", "train")),
    ("a/b:test", ("a/b", None, "test")),
    ("a/b::extra", ("a/b", None, "extra")),
    ("a/b:en:test", ("a/b", "en", "test")),
    ("a/b:train[:10%]", ("a/b", None, "train[:10%]")),
    ("a/b:en:train[5:10%]", ("a/b", "en", "train[5:10%]")),
  ],
)
def test_names_of_data_sets(name, want):
  assert text_sources.parse_data_set(name) == want


def test_embedded_text_is_split_into_disjoint_parts():
  plays = text_sources.embedded_plays()
  assert [p.splitlines()[0] for p in plays] == [
    "HAMLET, PRINCE OF DENMARK",
    "MACBETH",
    "OTHELLO, THE MOOR OF VENICE",
    "ROMEO AND JULIET",
    "JULIUS CAESAR",
    "AS YOU LIKE IT",
  ]
  parts = {p: text_sources.embedded_documents(p) for p in text_sources.PARTS}
  squeeze = lambda texts: "".join("".join(texts).split())  # noqa: E731
  total = len(squeeze(plays))
  sizes = {p: len(squeeze(d)) / total for p, d in parts.items()}
  assert sum(sizes.values()) == pytest.approx(1, abs=1e-12)
  assert sizes["train"] == pytest.approx(0.90, abs=0.01)
  assert sizes["calibration"] == pytest.approx(0.05, abs=0.005)
  assert sizes["evaluation"] == pytest.approx(0.05, abs=0.005)
  assert len(parts["train"]) > 100
  assert parts["train"][1].startswith("ACT I.\n\nScene I. Elsinore.")
  for part in text_sources.PARTS:
    assert read(["embedded"], part=part)[0] == parts[part]
    assert read([f"embedded:{part}"])[0] == parts[part]
  assert data.read_text(["embedded"]) == "\n\n".join(parts["evaluation"])


# --- the cache ---------------------------------------------------------------


def same(a, b):
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(a.offsets, b.offsets)
  assert (a.targets is None) == (b.targets is None)
  if a.targets is not None:
    np.testing.assert_array_equal(a.targets, b.targets)
  assert (a.vocab, a.report) == (b.vocab, b.report)


@pytest.fixture
def counted(monkeypatch):
  """Counts how often text really is tokenised."""
  calls = []
  write = token_cache._Job.write
  monkeypatch.setattr(
    token_cache._Job, "write", lambda *a: calls.append(1) or write(*a)
  )
  return calls


@pytest.mark.parametrize("chat", [False, True])
def test_cache_equals_memory(tmp_path, tok, counted, chat):
  talk = [{"role": r, "content": f"{r} 12"} for r in ("user", "assistant")]
  file = write_jsonl(
    tmp_path / "a.jsonl", [{"text": "abc", "messages": talk}] * 3
  )
  args = {"text_key": "messages" if chat else "text", "chat": chat}
  memory = data.load_tokens([str(file)], tok, **args)
  first = data.load_tokens([str(file)], tok, cache_dir=tmp_path / "c", **args)
  second = data.load_tokens([str(file)], tok, cache_dir=tmp_path / "c", **args)
  assert len(counted) == 2
  assert isinstance(second.tokens, np.memmap)
  same(memory, first)
  same(memory, second)


def test_cache_key_is_content_tokenizer_and_settings(tmp_path, tok, counted):
  cache = tmp_path / "c"
  file = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "def"}])
  load = lambda name=file, t=tok, **k: data.load_tokens(  # noqa: E731
    [str(name)], t, cache_dir=cache, **k
  )
  load()
  copy = write_jsonl(tmp_path / "b.jsonl", [{"text": "abc"}, {"text": "def"}])
  load(copy)  # the same content under another name
  assert len(counted) == 1
  load(max_tokens=3)
  other = files.write_directory(tmp_path / "t", files.gpt2(vocab=400))
  load(t=load_tokenizer(other))
  write_jsonl(file, [{"text": "abc"}, {"text": "deg"}])
  changed = load()
  assert len(counted) == 4
  assert tok.decode(changed.document(1)[:-1]) == "deg"


@pytest.mark.parametrize("damage", ["cut", "flip", "json", "gone", "longer"])
def test_a_damaged_cache_is_made_again(tmp_path, tok, counted, damage):
  load = lambda: data.load_tokens(  # noqa: E731
    ["embedded:evaluation"], tok, cache_dir=tmp_path
  )
  want = data.load_tokens(["embedded:evaluation"], tok)
  load()
  (binary,) = tmp_path.glob("*.bin")
  raw = binary.read_bytes()
  if damage == "cut":
    binary.write_bytes(raw[: len(raw) // 2])
  elif damage == "flip":
    binary.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
  elif damage == "longer":
    binary.write_bytes(raw + b"\0")
  elif damage == "gone":
    binary.unlink()
  else:
    binary.with_suffix(".json").write_text('{"format": 1')
  same(load(), want)
  assert len(counted) == 3
  same(load(), want)
  assert len(counted) == 3
  assert sorted(p.suffix for p in tmp_path.iterdir()) == [".bin", ".json"]


def test_a_failure_leaves_no_half_entry(tmp_path, tok, monkeypatch):
  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(token_cache._Job, "write", full)
  with pytest.raises(OSError, match="No space left"):
    data.load_tokens(["embedded:evaluation"], tok, cache_dir=tmp_path)
  assert list(tmp_path.iterdir()) == []


WORKER = """
import sys
from wide_jax import data
from wide_jax.tokenizers import load_tokenizer
tok = load_tokenizer(sys.argv[1])
got = data.load_tokens(["embedded"], tok, cache_dir=sys.argv[2])
rows = data.Rows(got, 64)
batch = data.Batches(rows, 4, 17).batch(5)
print(int(got.tokens.astype("int64").sum()), batch["ids"].tolist())
"""


def test_two_processes_at_once(tmp_path, folder, tok, repo):
  """Both write the same entry, read it, and draw the same batch."""
  run = [sys.executable, "-c", WORKER, str(folder), str(tmp_path)]
  workers = [
    subprocess.Popen(
      run,
      cwd=repo,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, "PYTHONHASHSEED": str(i)},
    )
    for i in range(2)
  ]
  outputs = [w.communicate(timeout=300)[0] for w in workers]
  assert [w.returncode for w in workers] == [0, 0]
  assert outputs[0] == outputs[1] != ""
  mine = data.load_tokens(["embedded"], tok, cache_dir=tmp_path)
  batch = data.Batches(data.Rows(mine, 64), 4, 17).batch(5)
  assert outputs[0] == (
    f"{int(mine.tokens.astype('int64').sum())} {batch['ids'].tolist()}\n"
  )
  assert sorted(p.suffix for p in tmp_path.iterdir()) == [".bin", ".json"]


def test_documents_start_and_end_as_the_model_wants(tmp_path):
  folder = files.write_directory(
    tmp_path / "t",
    files.gpt2(),
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
    add_bos_token=True,
  )
  tok = load_tokenizer(folder)
  file = write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cd"}])
  got = data.load_tokens([str(file)], tok)
  for i, text in enumerate(("ab", "cd")):
    assert list(got.document(i)) == [1, *tok.encode(text), 0]


def test_max_tokens_cuts_the_last_document(tmp_path, tok):
  file = write_jsonl(tmp_path / "a.jsonl", [{"text": "one two"}] * 9)
  whole = data.load_tokens([str(file)], tok)
  n = len(whole.document(0))
  got = data.load_tokens([str(file)], tok, max_tokens=2 * n + 1)
  assert len(got.tokens) == 2 * n + 1 and got.documents == 3
  np.testing.assert_array_equal(got.tokens, whole.tokens[: 2 * n + 1])


# --- chats -------------------------------------------------------------------


def test_chats_learn_the_replies_and_count_the_rest(tmp_path, tok):
  user = {"role": "user", "content": "say <|im_end|> 12"}
  reply = {"role": "assistant", "content": "the year"}
  rows = [
    {"messages": [user, reply]},
    {"messages": [user]},
    {"messages": None},
    {"messages": "hello"},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [user, {"role": "assistant", "content": " "}]},
    {"text": "x"},
  ]
  file = write_jsonl(tmp_path / "a.jsonl", rows)
  args = {"chat": True}
  got = data.load_tokens([str(file)], tok, **args)
  assert got.documents == 1
  assert "1 of 8 rows kept" in got.report
  assert "no assistant reply 2" in got.report
  end = tok.special["<|im_end|>"]
  learnt = got.tokens[got.targets]
  assert list(learnt) == [*tok.encode("the year"), end]
  row = data.Rows(got, 64).row(0)
  marked = row["weights"] > 0
  np.testing.assert_array_equal(row["targets"][marked], learnt)
  # The words of the message stay words: three turns' ends are the template's.
  assert list(got.tokens).count(end) == 2
  rows = [{"messages": [user]}]
  with pytest.raises(ValueError, match="no usable text.*no assistant reply 1"):
    data.load_tokens([str(write_jsonl(file, rows))], tok, **args)


def test_chats_need_a_template(tmp_path):
  tok = load_tokenizer(
    files.write_directory(tmp_path / "t", files.gpt2(), eos_token="<|im_end|>")
  )
  file = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}])
  with pytest.raises(ValueError, match="needs a chat template"):
    data.load_tokens([str(file)], tok, text_key="messages", chat=True)


# --- rows --------------------------------------------------------------------


def test_two_documents_in_one_row():
  """Trial G1: documents of 5 and 6 tokens in a row of 16."""
  one, two = [11, 12, 13, 14, 2], [21, 22, 23, 24, 25, 2]
  row = data.Rows(token_set(one, two), 16).row(0)
  pad = [0] * 5
  assert row["ids"].tolist() == one + two + pad
  assert row["segments"].tolist() == [1] * 5 + [2] * 6 + pad
  assert row["positions"].tolist() == [*range(5), *range(6), *pad]
  assert row["weights"].tolist() == [1] * 4 + [0] + [1] * 5 + [0] + pad
  assert row["targets"].tolist() == [*one[1:], 0, *two[1:], 0, *pad]
  other = data.Rows(token_set([31, 32, 33, 34, 2], two), 16).row(0)
  for key in row:
    np.testing.assert_array_equal(row[key][5:], other[key][5:])
  dtypes = {k: v.dtype for k, v in row.items()}
  assert dtypes.pop("weights") == np.float32
  assert set(dtypes.values()) == {np.dtype(np.int32)}


def test_a_document_longer_than_a_row_goes_on_in_the_next():
  tokens = [*range(10, 19), 2]
  rows = data.Rows(token_set(tokens, [30, 2]), 4)
  assert len(rows) == 3
  got = [rows.row(i) for i in range(3)]
  assert got[1]["ids"].tolist() == [14, 15, 16, 17]
  assert got[1]["segments"].tolist() == [1, 1, 1, 1]
  assert got[1]["positions"].tolist() == [0, 1, 2, 3]
  # The row before predicts the first token of this one.
  assert got[0]["targets"].tolist() == [11, 12, 13, 14]
  assert got[1]["targets"].tolist() == [15, 16, 17, 18]
  assert got[2]["ids"].tolist() == [18, 2, 30, 2]
  assert got[2]["segments"].tolist() == [1, 1, 2, 2]
  assert got[2]["weights"].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("packing", ["packed", "single"])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("seq_len", [2, 3, 7, 16, 500])
def test_every_token_is_a_target_once(packing, marked, seq_len, rng_seed):
  """Against a plain loop over the documents."""
  rng = np.random.default_rng(rng_seed)
  documents = [
    rng.integers(3, 1000, rng.integers(1, 20)).tolist() for _ in range(40)
  ]
  marks = [rng.random(len(d)) < 0.4 for d in documents] if marked else None
  rows = data.Rows(token_set(*documents, targets=marks), seq_len, packing)
  want = []
  for i, d in enumerate(documents):
    reach = len(d) if packing == "packed" else min(len(d), seq_len + 1)
    for j in range(1, reach):
      if marks is None or marks[i][j]:
        want.append(d[j])
  got, seen = [], 0
  for i in range(len(rows)):
    row = rows.row(i)
    assert row["weights"].sum() > 0
    assert not row["weights"][row["segments"] == 0].any()
    got += row["targets"][row["weights"] > 0].tolist()
    seen += 1
    for s in range(1, row["segments"].max() + 1):
      inside = np.flatnonzero(row["segments"] == s)
      assert inside.size and np.ptp(inside) == inside.size - 1
      np.testing.assert_array_equal(
        row["positions"][inside], np.arange(inside.size)
      )
  assert got == want
  assert rows.targets == len(want)


def test_pad_equal_to_eos_is_still_learnt():
  """Trial E1 (c): padding is found by mask, never by id."""
  row = data.Rows(token_set([5, 6, 2]), 5, "single", pad_id=2).row(0)
  assert row["ids"].tolist() == [5, 6, 2, 2, 2]
  assert row["segments"].tolist() == [1, 1, 1, 0, 0]
  assert row["weights"].tolist() == [1, 1, 0, 0, 0]
  assert row["targets"][row["weights"] > 0].tolist() == [6, 2]


def test_rows_without_targets_are_left_out_and_counted():
  """Trial E1 (a), (b): truncation may leave a chat no reply."""
  marks = [[0, 0, 0, 0, 0, 1], [0, 0, 1]]
  documents = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
  rows = data.Rows(token_set(*documents, targets=marks), 4, "single")
  assert (len(rows), rows.without_targets, rows.targets) == (1, 1, 1)
  assert rows.row(0)["ids"].tolist() == [7, 8, 9, 0]
  with pytest.raises(ValueError, match="no token to predict in rows of 4"):
    data.Rows(token_set(documents[0], targets=marks[:1]), 4, "single")
  with pytest.raises(ValueError, match="no token to predict"):
    data.Rows(token_set([1], [2]), 4)


def test_a_set_shorter_than_one_row_gives_one_padded_row():
  rows = data.Rows(token_set([5, 6, 2]), 100)
  assert len(rows) == 1
  assert (rows.row(0)["segments"] > 0).sum() == 3


@pytest.mark.parametrize(
  ("args", "message"),
  [((1,), "seq_len=1"), ((4, "dense"), "packing='dense'")],
)
def test_rows_refuse_nonsense(args, message):
  with pytest.raises(ValueError, match=message):
    data.Rows(token_set([1, 2]), *args)


# --- batches -----------------------------------------------------------------


def batches(n_rows, batch_size, seed=17):
  documents = [[100 + i, 200 + i, 2, 2] for i in range(n_rows)]
  return data.Batches(data.Rows(token_set(*documents), 4), batch_size, seed)


def firsts(batch):
  return (batch["ids"][..., 0] - 100).ravel().tolist()


def test_batches_depend_on_seed_and_step_alone():
  a, b = batches(10, 4), batches(10, 4)
  later = {step: a.batch(step) for step in range(9)}
  for step in (8, 2, 5, 0):  # any order, a fresh object
    for key, value in b.batch(step).items():
      np.testing.assert_array_equal(value, later[step][key])
      assert value.shape == (4, 4)
  other = batches(10, 4, seed=18)
  assert any(firsts(other.batch(s)) != firsts(later[s]) for s in range(9))


def test_epochs_are_different_permutations():
  got = batches(10, 5)
  epochs = [
    firsts(got.batch(2 * e)) + firsts(got.batch(2 * e + 1)) for e in range(4)
  ]
  assert all(sorted(e) == list(range(10)) for e in epochs)
  assert len({tuple(e) for e in epochs}) == 4
  assert got.epoch(3) == 1.5
  # Every row equally often, whatever the batch size.
  got = batches(7, 4)
  seen = sum((firsts(got.batch(s)) for s in range(7)), [])
  assert sorted(seen) == sorted(list(range(7)) * 4)


def test_fewer_rows_than_a_batch():
  got = batches(3, 8).batch(0)
  assert set(firsts(got)) == {0, 1, 2}
  assert (got["weights"].sum(-1) > 0).all()


def test_accumulation_is_the_same_micro_batches():
  got = batches(10, 2)
  whole = got.accumulated(3, 4)
  for a in range(4):
    for key, value in got.batch(3 * 4 + a).items():
      np.testing.assert_array_equal(whole[key][a], value)


def test_batches_refuse_nonsense():
  with pytest.raises(ValueError, match="batch_size=0"):
    batches(3, 0)
  with pytest.raises(ValueError, match="step=-1"):
    batches(3, 2).batch(-1)


# --- prefetching -------------------------------------------------------------


def alive():
  return [t for t in threading.enumerate() if t.name == "wide_jax-prefetch"]


def test_prefetch_gives_everything_in_order():
  assert list(data.prefetch(lambda s: s * s, 3, 8)) == [
    (s, s * s) for s in range(3, 8)
  ]
  assert list(data.prefetch(lambda s: s, 5, 5)) == []
  assert not alive()


def test_prefetch_raises_at_the_step_that_failed():
  def fn(step):
    if step == 2:
      raise KeyError("step two")
    return step

  got = []
  with pytest.raises(KeyError, match="step two"):
    for step, _ in data.prefetch(fn, 0, 5):
      got.append(step)
  assert got == [0, 1]
  assert not alive()


def test_prefetch_stops_with_its_user_and_runs_no_further_than_asked():
  made = []
  with contextlib.closing(
    data.prefetch(lambda s: made.append(s) or s, 0, 10**9, size=2)
  ) as stream:
    assert next(stream) == (0, 0)
    time.sleep(0.3)  # long enough for a thread that does not wait
    # One handed out, two in the queue, one in the thread's hands.
    assert len(made) <= 4
  assert not alive()
  with pytest.raises(RuntimeError):
    with contextlib.closing(data.prefetch(lambda s: s, 0, 10**9)) as stream:
      for step, _ in stream:
        if step == 5:
          raise RuntimeError("the training step failed")
  assert not alive()


# --- evaluation windows ------------------------------------------------------


def test_windows_score_each_token_once_but_the_first():
  """Trial I3: 20 tokens in windows of 8, stride 8."""
  got = data.eval_windows(np.arange(100, 120), 8)
  assert got["ids"].shape == (3, 8)
  assert got["weights"].sum(-1).tolist() == [7, 7, 3]
  scored = got["targets"][got["weights"] > 0].tolist()
  assert scored == [i for i in range(100, 120) if (i - 100) % 8]
  assert got["segments"].sum(-1).tolist() == [8, 8, 4]
  assert got["positions"][0].tolist() == list(range(8))
  np.testing.assert_array_equal(got["ids"][1, 1:], got["targets"][1, :-1])


@pytest.mark.parametrize(
  ("tokens", "windows"), [(2, 1), (7, 1), (8, 1), (9, 1), (10, 2), (16, 2)]
)
def test_windows_at_the_edges(tokens, windows):
  got = data.eval_windows(np.arange(tokens) + 5, 8)
  assert got["ids"].shape == (windows, 8)
  assert (got["weights"].sum(-1) > 0).all()
  whole, rest = divmod(tokens, 8)
  assert got["weights"].sum() == 7 * whole + max(rest - 1, 0)


@pytest.mark.parametrize("ids", [[], [5]])
def test_nothing_to_score_is_refused(ids):
  with pytest.raises(ValueError, match=f"text of {len(ids)} tokens"):
    data.eval_windows(ids, 8)
  with pytest.raises(ValueError, match="window=1"):
    data.eval_windows([1, 2, 3], 1)


def test_text_is_tokenised_once_without_start_or_end(tmp_path, tok):
  (tmp_path / "a.txt").write_text("Hello world\n\nHello 12\n")
  got = data.text_ids([str(tmp_path / "a.txt")], tok)
  assert got.tolist() == tok.encode("Hello world\n\nHello 12\n")
  assert data.text_ids(
    [str(tmp_path / "a.txt")], tok, max_tokens=3
  ).tolist() == (got[:3].tolist())
