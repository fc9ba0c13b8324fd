"""The HTTP server and the command line: knows HTTP and text, never arrays."""
