"""Constrain decoding: grammars, their compilation and the token masks of a step."""
