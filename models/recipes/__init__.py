"""Train and evaluate the pocket models, each with a fixed seed: one folder a model.

`speech`, `world` and `training` are shared: synthesized speech, the micro-world, and the loop.
"""
