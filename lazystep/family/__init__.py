"""Families: programs that differ in sizes only, as pure data.

Reading order: expression, skeleton, fit, plan.
"""
