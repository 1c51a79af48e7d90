"""Captured steps: what is replayed, what is noticed, and what is refused."""
