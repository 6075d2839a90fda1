"""Code that the HTTP and gRPC fronts (the processes that serve clients) share."""
