"""What a connector does for any engine: which blocks of a prompt the tiers have, which are loaded and saved in a step, and how.

A connector stands in two places. The scheduler's side (scheduler.py) finds the beginning of a prompt and makes jobs (jobs.py); the
worker's side (worker.py) moves their blocks between the engine's memory and the tiers (tier_stack.py), and lost.py keeps count of
what did not come. An adapter reads the engine's groups and tensors into Group and Segment (groups.py) and calls these.
"""
