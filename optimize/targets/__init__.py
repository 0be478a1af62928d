"""The targets, one a folder: a worker imports the one it runs, ``registry.targets`` all of them."""
