"""Tests of lazystep.integrations against the real packages."""
