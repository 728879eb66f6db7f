"""What is in a picture: the vision half of a checkpoint that sees, apart from its language model."""
