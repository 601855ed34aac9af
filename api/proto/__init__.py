"""The gRPC interface: specserve.proto and the modules generated from it.

Generated files are committed, so that an installation needs no compiler; a test compares them with
the proto file, whose header has the command that makes them.
"""
