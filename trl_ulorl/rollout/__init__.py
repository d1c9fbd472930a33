"""Segment rollout: pools, schedule, scoring and engines (Algorithm 1 of the paper)."""
