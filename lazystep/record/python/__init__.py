"""The Python front end: works everywhere, and is the oracle for the native one."""
