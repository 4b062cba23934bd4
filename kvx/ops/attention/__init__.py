"""Queries over cached keys and values: paged, batched, latent (MLA), sparse, and merging of parts. Kernels: native/attention."""
