"""How many instances of each service there should be, and what that would cost: see README.md."""
