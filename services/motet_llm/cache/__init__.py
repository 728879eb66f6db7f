"""Keep keys, values and recurrent states: block pool, block tables, prefix cache, offload tiers."""
