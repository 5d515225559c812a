"""Makes a card smaller for every program on it: slower, less memory, or both.

    python experiments/peers/slow_card.py CARD --hold 66 --keep-gib 40 --seconds 600

Under NVIDIA MPS one block a held multiprocessor spins there with all of its shared
memory, so that nothing else fits beside it; without MPS the card would take turns.
Above half of a card, blocks come in clusters of eight, side by side: multiprocessors
held one by one all over the card leave kernels that run in clusters nowhere to run.
Memory is allocated until only ``--keep-gib`` is free. No setting of the card changes.
Says "holding" once it does; ends on SIGTERM, with the process that started it, or after
its seconds. Needs CuPy; no hexijax and no JAX.
"""

import argparse
import ctypes
import os
import signal
import time

SHARED_BYTES = 227 * 1024
"""Most that one block may have on Hopper: all of a multiprocessor's."""

CLOCK_HZ = 2.0e9
"""Above any clock, so that it spins at least its seconds."""

CLUSTER = 8
"""The largest that every Hopper card takes."""

SCATTERED = 66
"""So many held one by one leave such kernels room (seen on an H200; 99 did not)."""

SPIN = r"""
extern "C" __global__ void CLUSTERED spin(const volatile int* stop, long long cycles) {
  extern __shared__ char claimed[];
  if (threadIdx.x == 0) {
    claimed[0] = 0;
    const long long start = clock64();
    while (!*stop && clock64() - start < cycles) __nanosleep(500000);
  }
  __syncthreads();
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("card")
    parser.add_argument("--hold", type=int, default=0, help="multiprocessors")
    parser.add_argument("--keep-gib", type=float, help="memory that stays free")
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = args.card
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    import cupy

    runtime = cupy.cuda.runtime
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    flag = runtime.hostAlloc(4, 0)
    value = ctypes.cast(flag, ctypes.POINTER(ctypes.c_int))
    value[0] = 0
    given = (cupy.uint64(flag), cupy.int64(args.seconds * CLOCK_HZ))
    clustered = args.hold // CLUSTER * CLUSTER if args.hold > SCATTERED else 0
    parts = {f"__cluster_dims__({CLUSTER}, 1, 1)": clustered, "": args.hold - clustered}
    launches = [
        (cupy.RawKernel(SPIN.replace("CLUSTERED", how), "spin"), blocks)
        for how, blocks in parts.items()
        if blocks
    ]
    for kernel, _ in launches:  # all loaded before one runs: loading waits for kernels
        kernel.max_dynamic_shared_size_bytes = SHARED_BYTES
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in launches]
    for stream, (kernel, blocks) in zip(streams, launches, strict=True):
        with stream:
            kernel((blocks,), (1024,), given, shared_mem=SHARED_BYTES)
    held = []
    if args.keep_gib is not None:
        surplus = runtime.memGetInfo()[0] - int(args.keep_gib * 2**30)
        if surplus > 0:
            held.append(runtime.malloc(surplus))
    free, total = runtime.memGetInfo()
    print(
        f"holding card {args.card}: {args.hold} multiprocessors, "
        f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free",
        flush=True,
    )
    parent, until = os.getppid(), time.monotonic() + args.seconds
    while not stopping and os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.1)
    value[0] = 1
    runtime.deviceSynchronize()
    for pointer in held:
        runtime.free(pointer)


if __name__ == "__main__":
    main()
