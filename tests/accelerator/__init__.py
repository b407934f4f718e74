"""A pretend accelerator: what would break on GPUs breaks in these tests, on a machine without one.

``pretend.h`` says what the device is, ``nccl.cpp`` what its collectives are. It is no GPU: no speed, no numerics of
one, no kernels that run beside the host. ``build`` compiles it once per version of torch, ``device`` installs it into a
process, ``ranks`` runs a function on several such processes.
"""
