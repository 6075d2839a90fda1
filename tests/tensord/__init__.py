"""Tests of tensord/."""
