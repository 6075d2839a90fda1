"""Code that the HTTP and gRPC fronts share."""
