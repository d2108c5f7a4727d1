/* kernels/launch.cuh - launching with programmatic dependent launch.
 *
 * A kernel launched by launch_after() may start while the one before it on the stream still runs;
 * so every such kernel calls ptx_wait_prior() before it reads or writes anything that an earlier
 * kernel writes or reads (before that: only its own shared memory, and constants such as weights;
 * what a rehearsal reads, see below, counts for nothing and must not stay in L1).
 * Its end implies the end of all before it. On devices before Hopper it is an ordinary launch.
 *
 * Some go further, by what the kernel before promises. index.cu, index_few.cu and products that
 * hold (BGK_HOLDS) let the next start once they have waited: then all before them is done, and
 * products beside them (BGK_BESIDE, bgk_matmul_early()) read it, and write what nobody reads,
 * without waiting; one of their threads waits at the end, which so is that of both. few.cu's early
 * ones let the next start when their results are there: attention to lists reads those, past L1,
 * before it waits. */
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

/* Of two rounds over what follows ptx_wait_prior(): round 0 is a rehearsal, which nobody waits for
 * and which changes nothing but the block's own memory; round 1 is real. All kernels of a layer are
 * larger than the processor's caches for instructions: so what it takes to fetch those that will
 * run is over when the kernel before ends. That pays where blocks have long to wait: few.cu and
 * mla_store.cu of a rank of several. The number is hidden from the compiler, which would make two
 * copies. With EVERY_LANE (for racecheck) there is no rehearsal. */
__device__ __forceinline__ int launch_first_round()
{
    int round;
#ifdef EVERY_LANE
    asm volatile("mov.s32 %0, 1;" : "=r"(round));
#else
    asm volatile("mov.s32 %0, 0;" : "=r"(round));
#endif
    return round;
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

/* Blocks in clusters of `cluster`; 1: of no cluster. */
template <typename... P, typename... A>
cudaError_t launch_clusters_after(void (*kernel)(P...), unsigned cluster, dim3 grid, dim3 block,
                                  size_t shared, cudaStream_t stream, A... a)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = !launch_programmatic() ? 0 : cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, P(a)...);
}

/* How many clusters of `cluster` blocks, which may be more than 8, run at the same time; 0: not
 * one. What the kernel needs of shared memory it must have been given. */
template <typename... P>
int launch_clusters_at_once(void (*kernel)(P...), unsigned cluster, dim3 block, size_t shared)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    int most = 0;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(cluster);
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const bool known = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                            1) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&most, kernel, &config) == cudaSuccess;
    cudaGetLastError(); /* a no is none of the next launch's */
    return known ? most : 0;
}

template <typename... P, typename... A>
cudaError_t launch_after(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                         cudaStream_t stream, A... a)
{
    return launch_clusters_after(kernel, 1, grid, block, shared, stream, a...);
}

#endif
