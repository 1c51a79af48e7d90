"""Trainers of other packages on the lazy device. Only these modules import the packages.

`pip install 'lazystep[integrations]'` installs the packages.

Reading order: accelerate, masks, transformers, lightning_logging, lightning_capture, lightning.
"""

from ..record.source import count_as_user_code

count_as_user_code(__file__)  # captured steps of the trainers are watched like the user's own
