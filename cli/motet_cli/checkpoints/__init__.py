"""Find the models that the command line names: folders, GGUF files, and names on a hub."""
