"""Read motet.toml: the models, roles and settings of a stack."""
