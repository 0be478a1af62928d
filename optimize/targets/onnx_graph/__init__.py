"""What runtimes share that read ONNX: the graph of a program as ONNX, and where integers stand in it."""
