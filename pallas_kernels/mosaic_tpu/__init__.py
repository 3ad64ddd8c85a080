"""Pallas kernels for TPU (Mosaic): blocks that nobody keeps are not visited.

Every kernel runs over a list of active blocks (a tile of tokens or of queries
x a block of channels, heads or keys) that is worked out in XLA and prefetched
into scalar memory; the grid is as long as the list.

Compiled for v5e, v5p and v6e and run in interpret mode; never run on a TPU.
"""

from pallas_kernels.mosaic_tpu import attention, attention_decode, matmul

OPS = {
  "matmul_n_sparse": matmul.N_SPARSE,
  "matmul_k_sparse": matmul.K_SPARSE,
  "gated_ffn": matmul.GATED_FFN,
  "attention_prefill": attention.PREFILL,
  "attention_decode": attention_decode.DECODE,
}
