"""Speech recognition: audio in, text with times out."""
