"""Whose voice it is: stretches of a sound to vectors that are near each other where one person speaks."""
