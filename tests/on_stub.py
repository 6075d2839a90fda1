"""Daemons of the tests on GPU workers, though the host has no GPU: ``pytest --on-stub``, or ``GPU_WORKERS`` for one daemon.

``--on-gpus`` puts them on this host's GPUs instead. On the stub the driver and JAX's plugin are the tests' stand-ins
(``tests/cuda_stub``), and each queued copy takes a while, so that what is not waited for has not happened yet. A test for which
the worker has to be a CPU's says so: ``@pytest.mark.cpu_workers(reason)``.

