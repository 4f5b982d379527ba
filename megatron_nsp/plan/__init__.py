"""What runs where, as values: trees, plans, layouts, schedules, bytes and marks. No torch.

tree, heads           the nodes of a domain, and which heads divide
chunks, ring_rows     how ring members share samples, and which keys each of them meets
backend, backend_*    what a way of dividing attention is, and each of them
backends, split       all of them by name, and the one that a node takes
plan                  which node and micro-batch each sample runs in
layout                which tokens a rank holds under a plan
static_layout         the same for a loader that knows no plan, and the way over
phases, schedule      what a rank's nodes do in a pass, in issue order
order                 which node goes first
traffic               what every exchange sends, in closed form
saving                which samples save their attention output
"""
