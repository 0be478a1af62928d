"""Half precision: which calls keep float32, and where casts go.

Float32 runs beside 16-bit values emulated in float32. A call is kept where its values come within a factor of 2 of the
range, where half makes a divisor zero, or where its rounding alone moves the outputs by more than all together may;
error that every call shares is stated, not chased. What may run in either type is assigned by a minimum cut whose value
is the number of casts. Numbers in a mask that half does not hold become a quarter of its lowest value, so that a fully
masked row stays finite. Recurrent layers, unfolded BatchNorms and what is made of integers stay float32. Apex's O1 to
O3 are tables in ``policies`` and look at no values. Without data of the user's own, operator names decide.

Beside integers half is a plan of names: TensorRT lowers it to one strongly typed graph whose Q/DQ have half scales;
ONNX Runtime's integer kernels read and write float32, so there planned layers stay float32 and only the rest is cast;
OpenVINO takes it as its precision hint. Weights become integers from float32: bfloat16 cannot hold the grid.
"""
