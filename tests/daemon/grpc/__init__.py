"""Tests of the gRPC front."""
