"""Tests of lazystep.checkpoint."""
