"""What stands between a caller and an engine: loading, delivery of outputs, streams and chat."""
