"""Tests of deploy/: each file is run, or validated by the program that it is for."""
