"""Trainers of other packages on the lazy device. Only these modules import the packages.

`pip install 'lazystep[integrations]'` installs the packages.

Reading order: accelerate.
"""
