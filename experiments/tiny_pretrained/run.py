"""Makes the embedded model: a small tokenizer and a small Llama.

    python experiments/tiny_pretrained/run.py --out DIR

Both see the train part of the embedded plays alone. The step that is kept is
chosen on the calibration part; the evaluation part is only scored. DIR gets
`model/` (a Hugging Face directory), `result.json` and `curve.png`. The README
beside this file has the answer.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import math
import pathlib
import platform
import shlex
import sys
import tempfile
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tokenizers as hf_tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import bigram  # noqa: E402

from wide_jax import (  # noqa: E402
  data,
  evaluate,
  export,
  loss,
  modules,
  step,
  text_sources,
  tokenizers,
)
from wide_jax.model_config import ModelConfig  # noqa: E402
from wide_jax.safetensors_io import read_json, write_json  # noqa: E402

END = "<|endoftext|>"
ROW = 1024  # tokens a training row, and the positions of the model
SHORT = 256  # half of the rows are cut into contexts of this length
ROWS = 16
EVERY = 50  # steps between two scores on the calibration part
WINDOWS = (256, 1024)
TRAIN_SCORED = 65536  # tokens of the train part that are scored in the end


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One model to train, and how."""

  vocab: int
  d_model: int
  n_layers: int
  dropout: float
  steps: int
  lr: float = 3e-3
  decay: float = 0.1

  @property
  def name(self) -> str:
    return (
      f"v{self.vocab}_d{self.d_model}_l{self.n_layers}"
      f"_drop{round(100 * self.dropout)}_{self.steps}"
    )

  @property
  def model(self) -> ModelConfig:
    return ModelConfig(
      vocab=self.vocab,
      d_model=self.d_model,
      n_layers=self.n_layers,
      n_heads=8,
      n_kv_heads=4,
      head_dim=32,
      d_ff=512,
      max_positions=ROW,
      tied=True,
    )


CHOSEN = Candidate(384, 192, 4, 0.15, 1500)


# --- text --------------------------------------------------------------------


def train_tokenizer(documents: list[str], vocab: int, folder: pathlib.Path):
  """Trains byte-level BPE and writes the files of a tokenizer to `folder`.

  Id 0 ends a document; nothing starts one.
  """
  core = hf_tokenizers.Tokenizer(models.BPE())
  core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  core.decoder = decoders.ByteLevel()
  core.train_from_iterator(
    documents,
    trainers.BpeTrainer(
      vocab_size=vocab,
      special_tokens=[END],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  core.save(str(folder / "tokenizer.json"))
  ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
  write_json(folder / "config.json", ends)
  write_json(folder / "generation_config.json", ends)
  write_json(
    folder / "tokenizer_config.json",
    {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "eos_token": END,
      "model_max_length": ROW,
      "clean_up_tokenization_spaces": False,
    },
  )
  return tokenizers.load_tokenizer(folder)


def train_stream(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
  """The train part, int32 [n]; the end token stands behind every document."""
  documents = text_sources.embedded_documents("train")
  end = [tokenizer.document_end_id]
  parts = [ids + end for ids in tokenizer.encode_batch(documents)]
  return np.concatenate(parts).astype(np.int32)


def part_windows(tokenizer, part: str, window: int) -> dict[str, np.ndarray]:
  """Windows of one part as `wide_jax.evaluate` scores them, [n, window]."""
  limit = TRAIN_SCORED if part == "train" else 0
  ids = data.text_ids(["embedded"], tokenizer, part=part, max_tokens=limit)
  return data.eval_windows(ids, window)


def row_starts(length: int, steps: int, seed: int) -> np.ndarray:
  """Where training rows begin, int32 [steps, ROWS].

  Every epoch cuts the stream at another offset and shuffles the rows, so that
  each token is seen equally often, behind ever different contexts.
  """
  rng = np.random.default_rng(seed)
  starts: list[np.ndarray] = []
  while sum(map(len, starts)) < steps * ROWS:
    cut = np.arange(rng.integers(ROW), length - ROW, ROW)
    starts.append(rng.permutation(cut))
  flat = np.concatenate(starts)[: steps * ROWS]
  return flat.reshape(steps, ROWS).astype(np.int32)


# --- training ----------------------------------------------------------------


def drop_residuals(rate: float):
  """An interceptor that drops what each sublayer adds to the residual stream.

  The decoder has no such dropout: it is built for frozen backbones.
  """

  def intercept(call, args, kwargs, context):
    y = call(*args, **kwargs)
    module = context.module
    if not isinstance(module, modules.Linear):
      return y
    if module.target not in ("o", "down") or len(args) < 2 or args[1] is None:
      return y
    key = jax.random.fold_in(args[1], ord(module.target[0]))
    return modules.dropout(y, key, rate)

  return nn.intercept_methods(intercept)


def mean_loss(decoder, rate, params, rows, short, key):
  """Mean nats a token of rows [B, ROW + 1]; `short` [B] cuts their context."""
  place_1T = jnp.arange(ROW)[None]
  cut_BT = jnp.broadcast_to(short[:, None], (len(rows), ROW))
  positions = jnp.where(cut_BT, place_1T % SHORT, place_1T)
  segments = 1 + jnp.where(cut_BT, place_1T // SHORT, 0)
  with drop_residuals(rate):
    hidden, _ = decoder.apply(
      {"params": params}, rows[:, :-1], positions, segments, drop_key=key
    )
  weights = jnp.full(positions.shape, 1.0 / positions.size)
  table = modules.head_table(params)
  return loss.next_token_loss(hidden, table, rows[:, 1:], weights)


def make_steps(c: Candidate, stream: np.ndarray):
  """(optimiser, jitted function that takes as many steps as it gets keys)."""
  decoder = modules.Decoder(c.model, attention="xla")
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, c.lr, max(1, c.steps // 20), c.steps, c.lr / 50
  )

  def decays(params):
    return jax.tree.map_with_path(
      lambda path, _: path[-1].key in ("kernel", "table"), params
    )

  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b2=0.98, weight_decay=c.decay, mask=decays),
  )
  stream = jnp.asarray(stream)
  grad = jax.value_and_grad(functools.partial(mean_loss, decoder, c.dropout))

  def one(carry, xs):
    params, state = carry
    starts, key = xs
    rows = stream[starts[:, None] + jnp.arange(ROW + 1)[None]]
    cut, drop = jax.random.split(key)
    short = jax.random.bernoulli(cut, shape=starts.shape)
    value, grads = grad(params, rows, short, drop)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), value

  @functools.partial(jax.jit, donate_argnums=(0,))
  def several(carry, starts, keys):
    return jax.lax.scan(one, carry, (starts, keys))

  return tx, several


def train(c: Candidate, stream, calibration, seed: int):
  """Trains one candidate.

  Args:
    stream: int32 [n], the train part.
    calibration: windows of the calibration part.

  Returns:
    (params of the lowest loss on the calibration part, curve); curve is a list
    of {"step", "train", "calibration"}, losses in nats a token.
  """
  tx, several = make_steps(c, stream)
  decoder = modules.Decoder(c.model, attention="xla")
  params = modules.init(decoder, seed, ("params",))["params"]
  kept = jax.tree.map(jnp.copy, params)  # the first call donates `params`
  carry = (params, tx.init(params))
  starts = row_starts(len(stream), c.steps, seed)
  keys = jax.random.split(jax.random.key(seed + 1), c.steps)
  best, curve = math.inf, []
  began = time.monotonic()
  for i in range(0, c.steps, EVERY):
    carry, values = several(carry, starts[i : i + EVERY], keys[i : i + EVERY])
    value = model_nll(c.model, carry[0], calibration)
    row = {
      "step": min(i + EVERY, c.steps),
      "train": float(values.mean()),
      "calibration": value,
    }
    curve.append(row)
    if value < best:
      best, kept = value, jax.tree.map(jnp.copy, carry[0])
    print(
      f"{c.name} step {row['step']} train {row['train']:.4f}"
      f" calibration {value:.4f} {time.monotonic() - began:.0f} s",
      flush=True,
    )
  return kept, curve


# --- scoring -----------------------------------------------------------------


_eval_step = jax.jit(step.eval_step, static_argnums=0)


def model_nll(model: ModelConfig, params, windows) -> float:
  """Mean nats a scored token, in float32."""
  decoder = modules.Decoder(model, attention="xla")
  total = targets = 0.0
  rows = max(1, 16384 // windows["ids"].shape[1])
  # On a GPU float32 products are TF32 unless told otherwise.
  with jax.default_matmul_precision("highest"):
    for batch in evaluate.window_batches(windows, rows):
      out = _eval_step(decoder, {"params": params}, batch, None)
      total += float(out["nll"])
      targets += float(out["targets"])
  return total / targets


def score(c: Candidate, params, stream, tokenizer) -> dict[str, Any]:
  """Perplexities of the model and of the bigram over the same tokens."""
  baseline = bigram.Bigram(stream, c.vocab)
  settings = baseline.best_settings(
    part_windows(tokenizer, "calibration", WINDOWS[0])
  )
  out: dict[str, Any] = {"bigram": settings}
  for part in text_sources.PARTS:
    out[part] = {}
    for window in WINDOWS:
      windows = part_windows(tokenizer, part, window)
      mine = model_nll(c.model, params, windows)
      base = baseline.nll(windows, settings)
      scored = windows["weights"] > 0
      text = tokenizer.decode(windows["targets"][scored])
      out[part][f"window_{window}"] = {
        "ppl": math.exp(mine),
        "bigram_ppl": math.exp(base),
        "ratio": math.exp(mine - base),
        "nats_a_byte": mine * int(scored.sum()) / len(text.encode()),
        "tokens": int(scored.sum()),
      }
  return out


# --- output ------------------------------------------------------------------


def plot(result: dict[str, Any], file: pathlib.Path) -> None:
  """Losses of training and of the calibration part over the steps."""
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  on = result["scores"]["calibration"][f"window_{WINDOWS[0]}"]
  curve, best = result["curve"], result["best_step"]
  steps = [row["step"] for row in curve]
  base = math.log(on["bigram_ppl"])
  lowest = min(row["calibration"] for row in curve)
  fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
  ax.plot(
    steps, [row["train"] for row in curve], label="train part, with dropout"
  )
  ax.plot(
    steps, [row["calibration"] for row in curve], label="calibration part"
  )
  ax.plot(best, lowest, "o", color="C1", label=f"stored: step {best}")
  ax.axhline(base, color="grey", ls="--", label="bigram, calibration part")
  ax.axhline(
    base - math.log(2), color="grey", ls=":", label="half its perplexity"
  )
  ax.set(
    xlabel="optimiser step",
    ylabel="loss, nats a token",
    title=f"The embedded model: {result['parameters'] / 1e6:.2f} M parameters",
    xlim=(0, steps[-1]),
  )
  ax.spines[["top", "right"]].set_visible(False)
  ax.legend(frameon=False)
  fig.savefig(file, dpi=130)
  plt.close(fig)


def circumstances(seed: int, out: pathlib.Path) -> dict[str, Any]:
  names = "jax jaxlib flax optax numpy tokenizers".split()
  device = jax.devices()[0]
  script = f"experiments/{HERE.name}/run.py"
  given = [a.replace(str(out), "DIR") for a in sys.argv[1:]]
  return {
    "command": shlex.join(["python", script, *given]),
    "seed": seed,
    "date": datetime.date.today().isoformat(),
    "device": f"{device.platform}: {device.device_kind}",
    "python": platform.python_version(),
    "versions": {n: importlib.metadata.version(n) for n in names},
    "tokens_a_step": ROW * ROWS,
  }


def run_one(c: Candidate, seed: int, out: pathlib.Path) -> dict[str, Any]:
  """Trains, scores and writes one candidate."""
  began = time.monotonic()
  with tempfile.TemporaryDirectory() as tmp:
    documents = text_sources.embedded_documents("train")
    tokenizer = train_tokenizer(documents, c.vocab, pathlib.Path(tmp))
    stream = train_stream(tokenizer)
    calibration = part_windows(tokenizer, "calibration", WINDOWS[0])
    params, curve = train(c, stream, calibration, seed)
    # What is scored is what is stored.
    stored = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    params = jax.tree.map(lambda a: a.astype(jnp.float32), stored)
    scores = score(c, params, stream, tokenizer)
    stored = jax.tree.map(np.asarray, stored)
    export.write_hf(out / "model", c.model, stored, tokenizer_dir=tmp)
  return {
    "name": c.name,
    "candidate": dataclasses.asdict(c),
    "parameters": sum(a.size for a in jax.tree.leaves(params)),
    "train_tokens": len(stream),
    "epochs": round(c.steps * ROW * ROWS / len(stream), 1),
    "best_step": min(curve, key=lambda row: row["calibration"])["step"],
    "scores": scores,
    "seconds": round(time.monotonic() - began, 1),
    "curve": curve,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument(
    "--steps", type=int, help="train for so many steps instead (a try-out)"
  )
  parser.add_argument("--seed", type=int, default=17)
  parser.add_argument(
    "--redraw",
    action="store_true",
    help="train nothing; draw DIR/curve.png from DIR/result.json again",
  )
  args = parser.parse_args()
  if args.redraw:
    plot(read_json(args.out / "result.json"), args.out / "curve.png")
    return
  args.out.mkdir(parents=True, exist_ok=True)
  c = CHOSEN
  if args.steps:
    c = dataclasses.replace(c, steps=args.steps)
  result = run_one(c, args.seed, args.out)
  print({"name": c.name, **result["scores"]["evaluation"]}, flush=True)
  write_json(
    args.out / "result.json", {**circumstances(args.seed, args.out), **result}
  )
  plot(result, args.out / "curve.png")


if __name__ == "__main__":
  main()
