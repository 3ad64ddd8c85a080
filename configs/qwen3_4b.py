"""Qwen3-4B: query and key norms, tied head.

    python -m wide_jax.train --config qwen3_4b --data DIR --workdir RUN
    python -m wide_jax.train --config qwen3_4b:smoke --workdir RUN

The weights come from the hub (Qwen/Qwen3-4B) or from a copy on disk,
given by `--config.model.path=PATH`. DIR holds the text that is named below;
smollm2_135m.py says in which form.

Hardware: two GPUs of 80 GB or more; `smoke` a CPU with 12 GiB.
Expected: not yet run. The recipe is that of arXiv 2607.28418 (10,000 steps of
16 x 4,096 tokens a stage, groups of 4 heads), with groups of 256 regrouped
channels in place of 32 contiguous ones.

Variants:
  (none)  as above
  smoke   2 layers of this shape, random weights, 2 steps a stage
"""

from ml_collections import config_dict

from wide_jax.configs import base

# The keys of the model's config.json that give its shape.
_SHAPE = {
  "model_type": "qwen3",
  "vocab_size": 151936,
  "hidden_size": 2560,
  "num_hidden_layers": 36,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "intermediate_size": 9728,
  "max_position_embeddings": 40960,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "tie_word_embeddings": True,
}
_DOMAINS = ("books", "wiki", "nonfiction", "web", "qa", "tech")


def get_config(arg: str = "") -> config_dict.ConfigDict:
  given = base.variants(arg, ("smoke",))
  c = base.get_config()
  c.model.path = "Qwen/Qwen3-4B"
  c.model.remat = "full"
  c.route.attn_group = 4
  c.route.ffn_group = 256

  c.data.train = tuple(f"corpus/{name}.jsonl.gz" for name in _DOMAINS)
  c.data.calibration = ("corpus/valid.jsonl",)
  c.data.seq_len = 4096
  c.data.batch_size = 16
  c.eval.text = "eval/wikitext2_raw_test.txt"
  c.eval.windows = (2048,)
  c.eval.every = 1000

  c.routers.steps = 10000
  c.routers.lr = 2e-3
  c.recover.steps = 10000
  c.recover.lr = 2e-4
  c.checkpoint.every = 500
  c.mesh.data, c.mesh.fsdp = 1, -1  # weights spread over all devices

  if "smoke" in given:
    base.random_layers(c, _SHAPE, layers=2)
  return c
