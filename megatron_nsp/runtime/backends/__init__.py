"""SP backends: how one node's attention is split over its ranks."""
