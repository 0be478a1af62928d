"""The targets, one backend a file. Importing this package registers them all."""
