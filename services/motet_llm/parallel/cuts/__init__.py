"""Cut a loaded model for one rank: its matrices, its experts, its layers; and compare the result."""
