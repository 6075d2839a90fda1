"""Tests of workers/imports/."""
