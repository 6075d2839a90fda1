"""Tests of stock clients against a real daemon."""
