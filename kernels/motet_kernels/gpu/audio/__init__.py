"""Compute log-mel spectra and convolutions with Triton."""
