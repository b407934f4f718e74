"""A pretend accelerator: what would break on GPUs breaks in these tests, on a machine without one.

``pretend.h`` says what the device is, ``nccl.cpp`` what its collectives are. It is no GPU: no speed, no numerics of
one, no kernels that run beside the host. ``build`` compiles it once per version of torch, ``device`` installs it into a
process, ``ranks`` runs a function on several such processes.

What code that ran on CPUs alone got wrong on a GPU, and where it is shown now:

- messages told apart by tags, receives posted before sends: ``test_pipelines``, every schedule
- a wait with a timeout, which aborts the communicator: ``test_lost_ranks``, a rank that is slow
- ranks that run different modules: ``test_training``, an error
- draws on the device that count nowhere, noise and states by device number: ``test_random``, ``test_checkpoints``
- parameters with one element under a fused optimizer: ``test_training``, fused optimizer
- results that differ by TF32: ``test_pipelines``, convolutions
- gloo groups that other ranks have to join, announcements on a group of NCCL alone: ``test_training``, groups
- a dead peer that NCCL does not notice: ``test_lost_ranks``
- pinned memory of twice the size, a wait for each tensor of a save: ``test_checkpoints``
- dtypes that NCCL lacks: ``test_nccl``, collectives of the package
- waits for the device and kernels of a step, beside those of torch: ``test_host_waits``
"""
