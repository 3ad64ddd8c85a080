"""Llama-3.1-8B: the model of the published results.

    python -m wide_jax.train --config llama31_8b --data DIR --workdir RUN
    python -m wide_jax.train --config llama31_8b:smoke --workdir RUN

The weights come from the hub (meta-llama/Llama-3.1-8B) or from a copy on disk,
given by `--config.model.path=PATH`. DIR holds the text that is named below;
smollm2_135m.py says in which form.

Hardware: four GPUs of 80 GB or more; `smoke` a CPU with 12 GiB.
Expected: not yet run on a real 8B model; `shapes` trained 14,295 tokens/s in
28.7 GiB on one H200 (experiments/llama8b_shapes). The recipe is that of arXiv
2607.28418 (10,000 steps of 16 x 4,096 tokens a stage, groups of 4 heads), with
groups of 256 regrouped channels in place of 32 contiguous ones.
Published at 50%: WikiText-2 perplexity 14.15 after stage 1.

Variants:
  (none)     256 channels a group, regrouped
  published  32 contiguous channels a group
  shapes     the full shape with random weights and 20 stage-1 steps of one row
             of 4,096 tokens of embedded text: speed and memory on one device
  smoke      2 layers of this shape, random weights, 2 steps a stage
"""

from ml_collections import config_dict

from wide_jax.configs import base

# The keys of the model's config.json that give its shape.
_SHAPE = {
  "model_type": "llama",
  "vocab_size": 128256,
  "hidden_size": 4096,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-05,
  "rope_theta": 500000.0,
  "rope_scaling": {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  },
  "tie_word_embeddings": False,
}


def get_config(arg: str = "") -> config_dict.ConfigDict:
  given = base.variants(arg, ("published", "shapes", "smoke"))
  c = base.get_config()
  base.paper_recipe(c)
  c.model.path = "meta-llama/Llama-3.1-8B"
  if "published" in given:
    c.route.ffn_group = 32
    c.regroup.enabled = False

  if "shapes" in given:
    layers = _SHAPE["num_hidden_layers"]
    base.random_layers(c, _SHAPE, layers=layers)
    base.few_steps(c, 20)
    c.model.shape.vocab_size = _SHAPE["vocab_size"]
    c.model.dtype = "bfloat16"
    c.model.remat = "dots"  # 5% faster than `none` there
    c.regroup.enabled = False
    c.recover.steps = 0
    c.data.seq_len = 4096
    c.eval.windows = (2048,)
    c.eval.max_tokens = 8192
    c.eval.calibration_tokens = 8192  # a row for each half

  if "smoke" in given:
    base.random_layers(c, _SHAPE, layers=2)
  return c
