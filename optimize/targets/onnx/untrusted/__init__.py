"""What is asked of an ONNX file before a runtime or a parser of its graph sees it.

`texts`: names are text. `tensors`: what is stored is there, inside the file's own folder, and as large as it says.
`calls`: functions and graphs inside one another stay within bounds. `survey` with `inference`: what loops repeat and
what constants grow to, as far as the file alone tells; the rest is for the limits of the process that runs it.
"""
