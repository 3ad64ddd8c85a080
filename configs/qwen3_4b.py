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


def get_config(arg: str = "") -> config_dict.ConfigDict:
  given = base.variants(arg, ("smoke",))
  c = base.get_config()
  base.paper_recipe(c)
  c.model.path = "Qwen/Qwen3-4B"

  if "smoke" in given:
    base.random_layers(c, _SHAPE, layers=2)
  return c
