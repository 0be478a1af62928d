"""Scripts that measure this project on real models; each prints a table and can be run by anyone."""
