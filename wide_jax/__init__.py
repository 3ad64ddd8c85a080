"""wide_jax: token-level dynamic width pruning for LLaMA-family models in JAX."""
