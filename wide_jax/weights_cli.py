"""`python -m wide_jax.weights check|merge`.

  check PATH                    our logits against transformers' on one text
  merge --model --lora --out    base + adapter as a plain Hugging Face model

Exit code 1: the check failed. Exit code 2: bad input, one sentence says what.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wide_jax import adapters, cli, export, paths, weights

# What float32 may cost: 1e-4, or 1e-5 of the largest logit where that is
# more. Measured at "highest" on a CPU: 5e-6 of 5 on the
# tiny models of the tests, 1.7e-4 of 40 on SmolLM2-135M (KL 2e-11).
MAX_DIFFERENCE, MAX_SHARE, MAX_KL = 1e-4, 1e-5, 1e-5
# At "default" an accelerator multiplies in TF32 (2^-11 a product) or bfloat16.
# A k_norm off by 2% moves logits by 4e-2 of the largest, and KL to 4e-4.
LOOSE_SHARE, LOOSE_KL = 1e-2, 1e-4

MERGED = "wide_merged.json"
_WINDOW = 512


# Tokens of the embedded text that `merge` scores where no text is named.
DEFAULT_TOKENS = 2048


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit code."""
  return cli.run(_main, argv)


def _main(argv: list[str]) -> int:
  args = _parser().parse_args(argv)
  return args.run(args)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m wide_jax.weights",
    description="Checks a model's import, or merges an adapter into it.",
    epilog=(
      "Exit code 0: done, or the check passed; 1: the check failed; 2: bad"
      " input, and one sentence says what."
    ),
  )
  commands = parser.add_subparsers(required=True, metavar="check|merge")
  check = commands.add_parser(
    "check",
    help="compare our logits with transformers' on one text (needs torch)",
    description=(
      "Compares our logits with transformers' on one text, in float32: mean KL"
      " and largest difference, each with its limit."
    ),
  )
  check.add_argument(
    "path",
    help="model directory, .gguf file, pkg:PACKAGE/FILE, hub id or 'embedded'",
  )
  check.add_argument(
    "--tokens",
    type=int,
    default=1000,
    metavar="N",
    help="tokens to compare (default %(default)s)",
  )
  check.add_argument(
    "--text", metavar="FILE", help="text file (default: the embedded text)"
  )
  check.add_argument(
    "--precision",
    choices=("highest", "default"),
    default="highest",
    help=(
      "of matrix products; 'default' is TF32 or bfloat16 on an accelerator and"
      " has wider limits (default %(default)s)"
    ),
  )
  check.set_defaults(run=_check)
  merge = commands.add_parser(
    "merge",
    help="write base + adapter as a plain Hugging Face model",
    description=(
      "Writes base + adapter as a plain Hugging Face model: the dense recovered"
      " model, in the base's channel order. Routers are left out."
    ),
  )
  merge.add_argument(
    "--model", required=True, metavar="BASE", help="the untouched base"
  )
  merge.add_argument(
    "--lora",
    required=True,
    metavar="DIR",
    help="a PEFT directory, or an export directory of wide_jax.train",
  )
  merge.add_argument(
    "--out", required=True, metavar="DIR", help="directory to write"
  )
  merge.add_argument(
    "--dtype",
    choices=("auto", "float32", "bfloat16", "float16"),
    default="auto",
    help="of the written weights (default %(default)s: as the base is stored)",
  )
  merge.add_argument(
    "--text",
    metavar="FILE",
    help=(
      "text to measure its perplexity on (default: the first"
      f" {DEFAULT_TOKENS:,} tokens of the embedded evaluation text)"
    ),
  )
  merge.add_argument(
    "--window",
    type=int,
    default=2048,
    metavar="N",
    help="tokens a window of that measurement (default %(default)s)",
  )
  merge.set_defaults(run=_merge)
  return parser


# --- check -------------------------------------------------------------------


class Difference(NamedTuple):
  """How far two models' logits lie apart.

  Attributes:
    tokens: positions compared.
    mean_kl: mean KL(theirs || ours) in nats.
    max_abs: largest difference of two logits.
    largest: largest of their logits, by size.
    argmax: share of positions with the same largest logit.
  """

  tokens: int
  mean_kl: float
  max_abs: float
  largest: float
  argmax: float


def _check(args) -> int:
  if args.tokens < 2:
    raise ValueError(f"--tokens {args.tokens} must be at least 2.")
  source = weights.resolve(args.path)
  try:
    import torch
    import transformers
  except ImportError as e:
    raise ValueError(
      f"check compares with transformers and needs {e.name}, which is not"
      " installed."
    ) from e
  import jax
  import jax.numpy as jnp

  from wide_jax import modules

  loaded = weights.load_params(source.path, dtype="float32")
  config, params = loaded.config, loaded.params
  print(loaded.report)
  ids, said = _ids(source, config, args)

  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  where = {"pretrained_model_name_or_path": source.path}
  if source.kind == "gguf":
    where = {
      "pretrained_model_name_or_path": source.path.parent,
      "gguf_file": source.path.name,
    }
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    **where, dtype=torch.float32, attn_implementation="eager"
  ).eval()

  def their_logits(row):
    with torch.no_grad():
      out = theirs(torch.tensor(row[None].astype(np.int64)), use_cache=False)
    return out.logits[0].numpy()

  def our_logits(row):
    out = modules.logits(config, params, jnp.asarray(row[None], jnp.int32))
    return np.asarray(out[0])

  window = min(_WINDOW, config.max_positions)
  rows = [ids[i : i + window] for i in range(0, len(ids), window)]
  with jax.default_matmul_precision(args.precision):
    found = compare(our_logits, their_logits, rows)
  exact = args.precision == "highest" or jax.default_backend() == "cpu"
  share = MAX_SHARE if exact else LOOSE_SHARE
  limit = max(MAX_DIFFERENCE, share * found.largest)
  limit_kl = MAX_KL if exact else LOOSE_KL
  # Written so that a NaN fails.
  good = found.max_abs <= limit and found.mean_kl <= limit_kl
  print(
    f"{found.tokens} tokens of {said}, float32, matmul precision"
    f" {args.precision} on {jax.devices()[0].device_kind}:\n"
    f"  mean KL         {found.mean_kl:.3e}  (at most {limit_kl:g})\n"
    f"  max difference  {found.max_abs:.3e}  (at most {limit:.1e})\n"
    f"  largest logit   {found.largest:.2f}\n"
    f"  same argmax     {found.argmax:.2%}\n"
    f"{'passed' if good else 'FAILED'}: {args.path} against transformers"
    f" {transformers.__version__}"
  )
  return 0 if good else 1


def compare(ours, theirs, rows) -> Difference:
  """Runs two functions ids [T] -> logits [T, V] over rows of tokens."""
  kl, worst, largest, same, n = 0.0, 0.0, 0.0, 0, 0
  for row in rows:
    a, b = ours(row), theirs(row)
    if a.shape != b.shape:
      raise ValueError(f"logits have shapes {a.shape} and {b.shape}.")
    # np.maximum, not max: a NaN has to stay.
    worst = np.maximum(worst, np.max(np.abs(a - b)))
    largest = np.maximum(largest, np.max(np.abs(b)))
    same += int(np.sum(a.argmax(-1) == b.argmax(-1)))
    for low in range(0, len(row), 64):  # float64 of a whole window is big
      log_a = _log_softmax(a[low : low + 64])
      log_b = _log_softmax(b[low : low + 64])
      kl += float(np.sum(np.exp(log_b) * (log_b - log_a)))
    n += len(row)
  return Difference(n, kl / n, float(worst), float(largest), same / n)


def _log_softmax(x: np.ndarray) -> np.ndarray:
  x = x.astype(np.float64)
  x -= x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _ids(source: weights.Source, config, args) -> tuple[np.ndarray, str]:
  """int [N] token ids, and where they are from."""
  try:
    ids = _encoded(source.path, args.text or paths.EMBEDDED_TEXT, args.tokens)
  except ValueError as e:
    if args.text:
      raise
    rng = np.random.default_rng(17)
    ids = rng.integers(0, config.vocab, args.tokens)
    return ids, f"random ids ({e})"
  if ids.max() >= config.vocab:
    raise ValueError(
      f"the tokenizer gives id {ids.max()}, the model has {config.vocab}."
    )
  return ids, str(args.text or "the embedded text")


def _encoded(model: pathlib.Path, text_file, n_tokens: int) -> np.ndarray:
  from wide_jax import tokenizers

  tokenizer = tokenizers.load_tokenizer(model)
  text = pathlib.Path(text_file).read_text(encoding="utf-8")
  # Eight characters a token is more than any text needs.
  ids = np.asarray(tokenizer.encode(text[: 8 * n_tokens + 1000]))[:n_tokens]
  if len(ids) < 2:
    raise ValueError(
      f"{text_file} gives {len(ids)} tokens with the tokenizer of {model};"
      " want 2 or more."
    )
  return ids


# --- merge -------------------------------------------------------------------


def _merge(args) -> int:
  if args.text and not pathlib.Path(args.text).is_file():
    raise ValueError(f"--text {args.text} is no file.")
  if args.window < 2:
    raise ValueError(f"--window {args.window} must be at least 2.")
  export.check_replaceable(args.out, MERGED)  # before a model is read
  source = weights.resolve(args.model)
  if source.kind == "hf" and (source.path / MERGED).is_file():
    before = json.loads((source.path / MERGED).read_text()).get("lora")
    raise ValueError(
      f"{source.path} is merged already (with {before}); give the base."
    )
  dtype = args.dtype
  if dtype == "auto":
    dtype = weights.open_source(source).dtype
  # By its own path: in the base's order, also where an export names it.
  loaded = weights.load_params(source.path, dtype=dtype)
  print(loaded.report)
  lora, lora_config = export.load_adapter(args.lora, loaded.config)
  merged = adapters.merge_lora(loaded.params, lora, lora_config)
  about = {
    "base": args.model,
    "lora": args.lora,
    "rank": lora_config.rank,
    "scale": lora_config.scale,
    "targets": list(lora_config.targets),
  }
  files = {MERGED: json.dumps(about, indent=2) + "\n"}
  if source.kind == "gguf":
    files |= _tokenizer_files(source.path)
  export.write_hf(
    args.out,
    loaded.config,
    merged.params,
    tokenizer_dir=source.path if source.kind == "hf" else None,
    files=files,
    marker=MERGED,
  )
  print(
    f"{args.out}: the dense recovered model in {dtype}, {args.model} with"
    f" {args.lora} (scale {lora_config.scale:g}) added in. It holds no router:"
    " every token computes the full width."
  )
  print(_perplexity(args))
  return 0


def _perplexity(args) -> str:
  """One sentence about the merged model on the text asked for."""
  from wide_jax import evaluate

  name = args.text or "the embedded text"
  try:
    score = evaluate.perplexity_of_path(
      args.out,
      args.text or "embedded",
      args.window,
      max_tokens=0 if args.text else DEFAULT_TOKENS,
    )
  except ValueError as e:
    if args.text:
      raise
    return f"perplexity not measured: {e}"  # a model without a tokenizer
  return f"perplexity on {name}, windows of {args.window}: {float(score):.4f}"


def _tokenizer_files(gguf_file: pathlib.Path) -> dict[str, str]:
  """The tokenizer of a GGUF file as Hugging Face files."""
  from wide_jax import gguf_tokenizer

  found = gguf_tokenizer.read_tokenizer(gguf_file)
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": found.add_bos,
  }
  if found.bos_id is not None:
    settings["bos_token"] = found.core.id_to_token(found.bos_id)
  if found.eos_ids:
    settings["eos_token"] = found.core.id_to_token(found.eos_ids[0])
  if found.chat_template:
    settings["chat_template"] = found.chat_template
  return {
    "tokenizer.json": found.core.to_str(),
    "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
  }
