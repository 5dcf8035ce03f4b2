// Source of features.ptx: nvcc 13.0 -ptx -arch=sm_90a features.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>
#include <cstdio>
extern "C" __global__ void halves(__half *o, const __half *a, __nv_bfloat16 *ob, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    __half2 h = __halves2half2(a[i], a[n - 1 - i]);
    h = __hfma2(h, h, h);
    o[i] = __hadd(__low2half(h), __high2half(h));
    ob[i] = __float2bfloat16(__half2float(o[i]) * 1.5f);
  }
}
extern "C" __global__ void integers(unsigned *o, const unsigned *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    unsigned x = a[i];
    unsigned long long y = (unsigned long long)x * 2654435761ull;
    o[i] = __popc(x) + __clz(x) * 100 + __ffs(x) * 7 + __brev(x) + (unsigned)(y % 1000003ull) +
           (x / 7u) + (x % 13u) + __funnelshift_l(x, x + 1, 5) + __byte_perm(x, ~x, 0x3614) +
           __umulhi(x, x + 3) + (unsigned)(((long long)(int)x) / -7ll) +
           __dp4a((int)x, (int)(x + 5), 3);
  }
}
extern "C" __global__ void floats(float *o, const float *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    float x = a[i];
    o[i] = sqrtf(x) + 1.0f / x + expf(-x) + logf(x) + floorf(x) + fmodf(x, 0.3f) + tanhf(x) +
           sinf(x) + erff(x) + rintf(x * 3) + (float)(int)x + rsqrtf(x);
  }
}
extern "C" __global__ void doubles(double *o, const double *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) o[i] = sqrt(a[i]) + 1.0 / a[i] + exp(-a[i]) + log(a[i]) + floor(a[i]);
}
extern "C" __global__ void last_block(float *o, const float *a, float *part, unsigned *cnt, int n) {
  __shared__ bool last;
  __shared__ float s[128];
  int t = threadIdx.x;
  s[t] = 0;
  for (int i = blockIdx.x * 128 + t; i < n; i += gridDim.x * 128) s[t] += a[i];
  __syncthreads();
  for (int d = 64; d; d /= 2) {
    if (t < d) s[t] += s[t + d];
    __syncthreads();
  }
  if (t == 0) {
    part[blockIdx.x] = s[0];
    __threadfence();
    last = atomicInc(cnt, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    float v = 0;
    for (int i = 0; i < gridDim.x; i++) v += ((volatile float *)part)[i];
    *o = v;
  }
}
extern "C" __global__ void pipeline(float *o, const float *a, int n) {
  __shared__ alignas(16) float s[2][128 * 4];
  int t = threadIdx.x, tiles = n / 512;
  float acc = 0;
  __pipeline_memcpy_async(&s[0][t * 4], a + t * 4, 16);
  __pipeline_commit();
  for (int k = 0; k < tiles; k++) {
    if (k + 1 < tiles) __pipeline_memcpy_async(&s[(k + 1) & 1][t * 4], a + (k + 1) * 512 + t * 4, 16);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    for (int j = 0; j < 4; j++) acc += s[k & 1][j * 128 + t];
    __syncthreads();
  }
  o[t] = acc;
}
extern "C" __global__ void fp8(unsigned char *o, const float *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    o[2 * i] = __nv_fp8_e4m3(a[i]).__x;
    o[2 * i + 1] = __nv_fp8_e5m2(a[i]).__x;
  }
}
struct P { int v[20]; float f; };
extern "C" __global__ void structure(float *o, const P p, int n) {
  int i = threadIdx.x;
  o[i] = p.v[i % 20] * p.f + (float)p.v[(n + i) % 20];
}
__device__ __noinline__ int twice(int x) { return x > 40 ? x : 2 * x; }
extern "C" __global__ void control(int *o, int n) {
  int t = threadIdx.x, v = 0, loc[16];
  for (int i = 0; i < 16; i++) loc[(i * n + t) & 15] = i;
  switch ((t + n) % 7) {
    case 0: v = 1; break;
    case 1: v = t; break;
    case 2: v = 3 * t; break;
    case 3: v = t / 3; break;
    case 4: for (int i = 0; i < t; i++) v += i ^ n; break;
    case 5: v = -t; break;
    default: v = twice(t);
  }
  o[t] = v + loc[n & 15];
  if (t == 5) printf("t=%d %s %.1f\n", v, "text", 0.5 * v);
}
