"""The vocabulary of ops, one file per family; importing a file declares its ops."""
