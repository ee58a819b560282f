"""The stages of `benchmarks.device_check`: each runs in a process of its own, started by `worker`."""
