"""Advance recurrent states: convolution, Mamba, and the gated delta rule."""
