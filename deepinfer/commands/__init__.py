"""The handlers of the `deepinfer` command, one module each, imported when it is called.

A handler is ``run(args: argparse.Namespace) -> int``. It writes data to stdout, progress to stderr,
and returns the exit code; a DeepInferError that it raises is printed and turned into one by
``deepinfer.cli``.
"""
