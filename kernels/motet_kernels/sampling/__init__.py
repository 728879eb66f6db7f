"""Sample tokens: edits, masks, filters, draws, log-probabilities, and verified drafts."""
