"""One folder per part of the package; here what crosses parts. Start with test_tiny.py."""
