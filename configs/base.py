"""What every config starts from: all fields of `RunConfig` with their defaults.

A config is a file with `get_config(arg="")` that takes this one and changes
what differs. `arg` is what follows the colon in `--config NAME:arg`. Nothing
here repeats a default: they are read from the dataclasses.
"""

import dataclasses
import typing
from collections.abc import Sequence

from ml_collections import config_dict

from wide_jax.config import RunConfig

# Rows of the embedding of random models: more than the embedded tokenizer has.
RANDOM_VOCAB = 512


def get_config(arg: str = "") -> config_dict.ConfigDict:
  """The defaults of `RunConfig`.

  Raises:
    ValueError: there is an `arg`; this config has no variants.
  """
  variants(arg, ())
  return _section(RunConfig())


def variants(arg: str, known: Sequence[str]) -> tuple[str, ...]:
  """Splits `smoke` or `published,smoke` and checks every part.

  Raises:
    ValueError: naming the unknown variant and the known ones.
  """
  given = tuple(part for part in arg.split(",") if part)
  for part in given:
    if part not in known:
      raise ValueError(
        f"variant {part!r} must be one of {tuple(known)}, or several of them"
        " joined by a comma."
      )
  return given


def corpus(c: config_dict.ConfigDict) -> None:
  """Text below `--data`: `corpus/` to train on, WikiText-2 to score."""
  domains = ("books", "wiki", "nonfiction", "web", "qa", "tech")
  c.data.train = tuple(f"corpus/{name}.jsonl.gz" for name in domains)
  c.data.calibration = ("corpus/valid.jsonl",)
  c.eval.text = "eval/wikitext2_raw_test.txt"


def paper_recipe(c: config_dict.ConfigDict) -> None:
  """Stages of arXiv 2607.28418, weights spread over all devices.

  Groups of 4 heads as there, but of 256 channels in place of 32.
  """
  corpus(c)
  c.model.remat = "full"
  c.route.attn_group = 4
  c.route.ffn_group = 256
  c.data.seq_len = 4096
  c.data.batch_size = 16
  c.eval.windows = (2048,)
  c.eval.every = 1000
  c.routers.steps = 10000
  c.routers.lr = 2e-3
  c.recover.steps = 10000
  c.recover.lr = 2e-4
  c.checkpoint.every = 500
  c.mesh.data, c.mesh.fsdp = 1, -1


def few_steps(c: config_dict.ConfigDict, steps: int) -> None:
  """Makes a run short: `steps` a stage, every step logged, one checkpoint."""
  c.routers.steps = steps
  c.recover.steps = steps
  if c.dense_lora.steps:
    c.dense_lora.steps = steps
  c.checkpoint.every = steps
  c.log_every = 1


def random_layers(c: config_dict.ConfigDict, shape: dict, layers: int) -> None:
  """Random weights in a model's own shape, but `layers` deep, on any CPU.

  The routing flags stay as they are, so that what is tried is the real run but
  for its size. Text and tokenizer are the embedded ones.
  """
  c.model.path = "random"
  c.model.tokenizer = "embedded"
  c.model.shape = config_dict.ConfigDict(
    dict(shape, num_hidden_layers=layers, vocab_size=RANDOM_VOCAB)
  )
  c.model.dtype = "float32"  # CPUs compute bfloat16 slowly
  c.data.train = c.data.calibration = ("embedded",)
  c.data.max_tokens = 20000
  c.data.seq_len = 64
  c.data.batch_size = 1
  c.eval.text = "embedded"
  c.eval.windows = (64,)
  c.eval.max_tokens = 128
  c.eval.batch_size = 1
  c.eval.calibration_tokens = 128
  c.regroup.tokens = 128
  c.regroup.directions = 8
  c.regroup.iterations = 2
  c.mesh.data, c.mesh.fsdp = -1, 1
  for stage in (c.routers, c.recover, c.dense_lora):
    stage.accumulate = 1
  few_steps(c, 2)


def _section(value) -> config_dict.ConfigDict:
  """A dataclass as a ConfigDict that knows the type of fields that are None."""
  hints = typing.get_type_hints(type(value))
  out = config_dict.ConfigDict()
  for field in dataclasses.fields(value):
    default = getattr(value, field.name)
    if dataclasses.is_dataclass(default):
      default = _section(default)
    elif default is None:
      kinds = typing.get_args(hints[field.name])
      default = config_dict.placeholder(
        next(k for k in kinds if k is not type(None))
      )
    elif isinstance(default, dict):
      default = config_dict.ConfigDict(default)
    elif isinstance(default, str):
      default = str(default)  # an enum member as its plain value
    out[field.name] = default
  return out
