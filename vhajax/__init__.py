"""vhajax: language models whose attention keeps the KV cache small, in JAX."""
