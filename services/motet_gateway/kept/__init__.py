"""Keep connections and replies beyond the death of this gateway (docs/front.md)."""
