"""Tests of what is in deploy/: each file is run, or validated by the engine that it is for."""
