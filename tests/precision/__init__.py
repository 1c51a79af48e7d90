"""Tests of mixed precision."""
