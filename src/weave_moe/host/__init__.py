"""The CPU engine: the scheduler of the GPU kernel on threads, each task a plain loop."""
