"""The gRPC front: a process that serves inference.GRPCInferenceService to clients over HTTP/2."""
