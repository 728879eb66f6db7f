"""Scale services to their load, and simulate what a number of instances costs: see README.md."""
