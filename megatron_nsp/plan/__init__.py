"""What runs where, as values: trees, plans, layouts, schedules, bytes and marks. No torch.

tree, heads, split    the nodes of a domain, and how one of them divides attention
plan                  which node and micro-batch each sample runs in
layout, ring_rows     which tokens a rank holds under a plan, and which keys it meets
static_layout         the same for a loader that knows no plan, and the way over
schedule, order       the phases of a rank's nodes in issue order
traffic               what every exchange sends, in closed form
saving                which samples save their attention output
"""
