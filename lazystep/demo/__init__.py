"""The demo: a byte-level GPT learns Python from the source of Python's standard library.

Reading order: byte_gpt, display, run.
"""

from ..record.source import count_as_user_code

count_as_user_code(__file__)  # lines of the demo are the user's, although they lie in the package
