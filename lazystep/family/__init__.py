"""Families: programs that differ in sizes only, as pure data. Read in this order:

expression, skeleton, fit, plan.
"""
