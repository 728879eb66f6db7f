"""Read what is to be embedded: texts, token ids and pictures, in the shapes of several clients."""
