"""Tests of tensord, one folder for each package or topic."""
