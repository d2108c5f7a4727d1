/* kernels/cluster.cuh - the two halves of a cluster's barrier, for kernels whose blocks have work
 * between them; compute capability 9.0 and later. */
#ifndef BGK_CLUSTER_CUH
#define BGK_CLUSTER_CUH

/* barrier.cluster.arrive: says so, and orders nothing: for "all blocks are there" alone. */
__device__ inline void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/* barrier.cluster.wait: until all threads of the cluster have arrived. */
__device__ inline void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

#endif
