"""Runs a model: requests → scheduler → batch → runner → sampled tokens. One `step()` loop for every
caller.
"""
