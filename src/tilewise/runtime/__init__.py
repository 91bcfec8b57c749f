"""The GPU of this machine: device facts, streams, memory and launches, thin over cuda.core.

Nothing here knows what a matrix product is. Every way in passes `driver.require`, which says what
is missing before anything of CUDA is touched; importing this touches nothing. Where cuda.core has
no call, or does too much, the driver is called through cuda.bindings, which cuda.core brings.
"""
