"""A captured step and what Python can change around it between two calls: each change is noticed."""
