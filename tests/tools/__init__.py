"""The command line, pages, examples, reports and settings."""
