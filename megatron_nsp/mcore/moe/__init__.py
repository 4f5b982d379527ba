"""Experts of a model whose tokens lie where the plan puts them: routing by the whole domain."""
