"""Load and run recognizers: one family of models each, and the list of what loads."""
