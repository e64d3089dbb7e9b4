"""The vocabulary of ops, one file per family. Importing this package declares them all."""
