"""Overlap: updates inside backward, against plain DDP in real processes."""
