"""Chat: text, pictures as input, and the list of models that serve them."""
