"""Compute one stage of a model of several: send hidden states, and go on from another's."""
