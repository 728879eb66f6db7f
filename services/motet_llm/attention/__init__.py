"""Compute attention over the paged cache: full, latent (MLA), windowed, long, compressed."""
