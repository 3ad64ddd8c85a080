"""Llama-3.2-1B: regrouped channels, groups of 256.

    python -m wide_jax.train --config llama32_1b --data DIR --workdir RUN
    python -m wide_jax.train --config llama32_1b:smoke --workdir RUN

The weights come from the hub (meta-llama/Llama-3.2-1B) or from a copy on disk,
given by `--config.model.path=PATH`. DIR holds the text that is named below;
smollm2_135m.py says in which form.

Hardware: one GPU of 80 GB or more; `smoke` a CPU with 12 GiB.
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
  "model_type": "llama",
  "vocab_size": 128256,
  "hidden_size": 2048,
  "num_hidden_layers": 16,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "intermediate_size": 8192,
  "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-05,
  "rope_theta": 500000.0,
  "rope_scaling": {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  },
  "tie_word_embeddings": True,
}


def get_config(arg: str = "") -> config_dict.ConfigDict:
  given = base.variants(arg, ("smoke",))
  c = base.get_config()
  base.paper_recipe(c)
  c.model.path = "meta-llama/Llama-3.2-1B"

  if "smoke" in given:
    base.random_layers(c, _SHAPE, layers=2)
  return c
