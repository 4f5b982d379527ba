"""What a plan takes: time, bytes and memory, from a profile and a model's shape. No torch.

profile, models, shape    a machine, models by name, and a layer's numbers
node_cost                 attention of one node, for every way of splitting it
cost_model                times of a sample at every degree, and of a whole plan
score, bounds             the time of a step, and what no plan can be faster than
memory                    tokens that fit a rank
"""
