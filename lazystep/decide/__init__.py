"""What an op does, from the metadata of its arguments alone.

Reading order: decision, facts, work, decide, stand_ins, trial, view_rules, shape_rules, image_rules, resized.
"""
