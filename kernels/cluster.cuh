/* kernels/cluster.cuh - the two halves of a cluster's barrier, for kernels whose blocks have work
 * between them; compute capability 9.0 and later. */
#ifndef BGK_CLUSTER_CUH
#define BGK_CLUSTER_CUH

#include <stdint.h>

/* barrier.cluster.arrive: says so, and orders nothing: for "all blocks are there" alone. */
__device__ inline void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/* The same, and what the thread wrote before is there for who waited. */
__device__ inline void cluster_arrive_release()
{
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

/* barrier.cluster.wait: until all threads of the cluster have arrived. */
__device__ inline void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/* %cluster_ctarank */
__device__ inline uint32_t cluster_rank()
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* mapa: where `at`, an address of this block's shared memory, is in that of block `rank`. */
__device__ inline uint32_t cluster_map(uint32_t at, uint32_t rank)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

/* st.async: to a block of the cluster, whose barrier `bar` counts the bytes. */
__device__ inline void cluster_send(uint32_t there, float4 v, uint32_t bar)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
                 : "memory");
}

__device__ inline void cluster_send(uint32_t there, float2 v, uint32_t bar)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
                 "[%0], {%1, %2}, [%3];" ::"r"(there),
                 "f"(v.x), "f"(v.y), "r"(bar)
                 : "memory");
}

__device__ inline void cluster_put(uint32_t there, float v)
{
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
}

__device__ inline void cluster_put(uint32_t there, float4 v)
{
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

#endif
