"""Evaluate the quality of engine settings offline: perplexity, tasks and speculation (`motet eval`)."""
