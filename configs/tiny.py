"""The embedded model on the embedded plays: the demo.

    python -m wide_jax.train --config tiny --workdir runs/demo

Hardware: any CPU; with set-up under 6 minutes on two cores (`make demo`).
Expected: half of the groups skipped (within 0.5 points on text not calibrated
on); log-perplexity rises after stage 1 by at most half of what random masks of
that rate cost, and less after stage 2.

Variants: `smoke`, 20 steps a stage in float32, heads and groups divisible by 2,
for tests on several devices.
"""

from ml_collections import config_dict

from wide_jax.configs import base


def get_config(arg: str = "") -> config_dict.ConfigDict:
  smoke = "smoke" in base.variants(arg, ("smoke",))
  c = base.get_config()
  c.model.path = "embedded"
  c.model.dtype = "float32"  # CPUs compute bfloat16 slowly
  c.route.attn_group = 1
  c.route.ffn_group = 32
  c.route.rank = 32
  c.regroup.directions = 16

  c.data.seq_len = 128
  c.data.batch_size = 8
  c.eval.windows = (256,)
  c.eval.max_tokens = 16384
  c.eval.batch_size = 16
  c.eval.calibration_tokens = 32768

  c.routers.steps = 250
  c.routers.lr = 5e-3
  c.recover.steps = 150
  c.recover.lr = 1e-3
  c.dense_lora.steps = 150
  c.dense_lora.lr = 1e-3
  c.checkpoint.every = 50

  if smoke:
    base.few_steps(c, 20)
    c.checkpoint.every = 5
    c.data.seq_len = 64
    c.data.batch_size = 4
    c.eval.windows = (64,)
    c.eval.max_tokens = 1024
    c.eval.calibration_tokens = 2048
    c.regroup.tokens = 512
    c.regroup.iterations = 5
  return c
