/* kernels/launch.cuh - launching with programmatic dependent launch.
 *
 * A kernel launched by launch_after() may start while the one before it on the stream still runs;
 * so every such kernel calls ptx_wait_prior() before it reads or writes anything that an earlier
 * kernel writes or reads (before that: only its own shared memory, and constants such as weights).
 * Its end implies the end of all before it. On devices before Hopper it is an ordinary launch. */
#ifndef BGK_LAUNCH_CUH
#define BGK_LAUNCH_CUH

#include <cuda_runtime.h>

/* griddepcontrol.wait: all work of the kernel before is done and visible. */
__device__ inline void ptx_wait_prior()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* griddepcontrol.launch_dependents: the next kernel may be started once all blocks said so. */
__device__ inline void ptx_let_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Whether the present device knows programmatic launches; asked once. */
inline bool launch_programmatic()
{
    static const bool yes = [] {
        int device = 0, major = 0;
        return cudaGetDevice(&device) == cudaSuccess &&
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
                   cudaSuccess &&
               major >= 9;
    }();
    return yes;
}

template <typename... P, typename... A>
cudaError_t launch_after(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                         cudaStream_t stream, A... a)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = launch_programmatic() ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, P(a)...);
}

#endif
