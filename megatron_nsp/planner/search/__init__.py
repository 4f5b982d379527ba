"""Placing samples: a batch in micro-batches, the search of one, and making placements better."""
