/* kernels/ptx.cuh - single instructions that CUDA C has no name for. */
#ifndef BGK_PTX_CUH
#define BGK_PTX_CUH

#include <stdint.h>

/* cp.async.cg: 16 bytes from global to shared memory, both 16-byte aligned. */
__device__ inline void ptx_copy16(void *shared, const void *global)
{
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global));
}

/* The same; 0 instead of what is not there. */
__device__ inline void ptx_copy16_if(void *shared, const void *global, bool there)
{
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(there ? 16 : 0));
}

/* What createpolicy.fractional.L2::evict_first makes of 1.0: what is read by it leaves L2 before
 * all else. */
constexpr uint64_t PTX_LEAVES_FIRST = 0x12f0000000000000;

/* ptx_copy16() of what nobody reads again before much else was read. `shared` must not look like a
 * register plus a uniform one: of that, with a policy, ptxas 13.0 makes an instruction that is none
 * (LDGSTS [R+UR0]; cuobjdump -sass shows it). So multiply it by blockDim.y, which is 1. */
__device__ inline void ptx_copy16_once(uint32_t shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "l"(PTX_LEAVES_FIRST));
}

__device__ inline void ptx_copy_commit()
{
    asm volatile("cp.async.commit_group;");
}

/* cp.async.bulk.prefetch: so many bytes, a multiple of 16, to L2; by one thread. */
__device__ inline void ptx_prefetch(const void *global, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/* Waits until at most N of the thread's groups are under way. */
template <int N> __device__ inline void ptx_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

/* ldmatrix: 8x8 matrices of half; lane l gives the address of row l % 8 of matrix l / 8. All lanes.
 */
__device__ inline void ptx_ldmatrix4(uint32_t (&r)[4], const void *shared)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ inline void ptx_ldmatrix2(uint32_t (&r)[2], const void *shared)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at));
}

/* mma.sync m16n8k16: d += a b, half in, float32 sums. All lanes. */
__device__ inline void ptx_mma16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
