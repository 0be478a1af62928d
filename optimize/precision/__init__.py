"""Half precision: which calls keep float32, where casts go, and how losses are scaled while training."""
