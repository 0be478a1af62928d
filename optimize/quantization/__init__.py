"""INT8: numeric formats, calibration, and the decisions that live on a program until a target lowers it."""
