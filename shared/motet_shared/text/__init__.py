"""Handle text consistently in several services: token pieces, prefix names, sentences, JSON."""
