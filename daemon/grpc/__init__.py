"""The gRPC front: one process that speaks inference.GRPCInferenceService to clients, over HTTP/2 connections of its own."""
