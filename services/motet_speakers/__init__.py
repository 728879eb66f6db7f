"""Embed voices: stretches of audio to vectors that are similar if the speaker is the same."""
