"""Programs that test the Triton kernels without a GPU, each in a process of its own: ``grid`` and ``mutants`` in
Triton's interpreter, which must be chosen before the kernels are imported, and ``aot``, which compiles them."""
