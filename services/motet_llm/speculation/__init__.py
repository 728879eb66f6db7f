"""Decode speculatively: drafts, their verification, and the controller of their lengths."""
