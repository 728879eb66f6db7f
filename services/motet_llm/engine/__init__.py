"""Run requests step by step: the engine, its requests, the model runner and the sampler."""
