/* libcudart.so.13: CUDA's runtime. What is not defined here is a stub, made from the names in the real one. */

#include "gpu.h"
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK return cudaSuccess
#define GIVE(place, value) \
    do { *(place) = (value); OK; } while (0)
typedef cudaError_t Error;

/* Devices. */
API Error cudaDriverGetVersion(int *version) { GIVE(version, CUDA_RELEASE); }
API Error cudaRuntimeGetVersion(int *version) { GIVE(version, CUDA_RELEASE); }
API Error cudaGetDeviceCount(int *count) {
    *count = gpu_count();
    return *count ? cudaSuccess : cudaErrorNoDevice;
}
API Error cudaGetDevice(int *device) { GIVE(device, gpu_current()); }
API Error cudaSetDevice(int device) { return gpu_choose(device) ? cudaSuccess : cudaErrorInvalidDevice; }
API Error cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    GIVE(value, gpu_attribute(attribute));
}
API Error cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    memset(&p->uuid, 7, sizeof p->uuid);
    p->uuid.bytes[15] = gpu_number(device);
    p->pciBusID = 7 + gpu_number(device);
    strcpy(p->name, NAME);
    p->totalGlobalMem = TOTAL_BYTES;
    p->major = gpu_attribute(cudaDevAttrComputeCapabilityMajor);
    p->minor = gpu_attribute(cudaDevAttrComputeCapabilityMinor);
    p->multiProcessorCount = MULTIPROCESSORS;
    p->warpSize = gpu_attribute(cudaDevAttrWarpSize);
    p->maxThreadsPerBlock = gpu_attribute(cudaDevAttrMaxThreadsPerBlock);
    for (int n = 0; n < 3; n++) {
        p->maxThreadsDim[n] = gpu_attribute(cudaDevAttrMaxBlockDimX + n);
        p->maxGridSize[n] = gpu_attribute(cudaDevAttrMaxGridDimX + n);
    }
    p->sharedMemPerBlock = gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p->sharedMemPerBlockOptin = gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->sharedMemPerMultiprocessor = gpu_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p->reservedSharedMemPerBlock = gpu_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    p->regsPerBlock = gpu_attribute(cudaDevAttrMaxRegistersPerBlock);
    p->regsPerMultiprocessor = gpu_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    p->maxThreadsPerMultiProcessor = gpu_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    p->maxBlocksPerMultiProcessor = gpu_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    p->totalConstMem = gpu_attribute(cudaDevAttrTotalConstantMemory);
    p->l2CacheSize = gpu_attribute(cudaDevAttrL2CacheSize);
    p->memoryBusWidth = gpu_attribute(cudaDevAttrGlobalMemoryBusWidth);
    p->asyncEngineCount = gpu_attribute(cudaDevAttrAsyncEngineCount);
    p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = p->managedMemory = p->cooperativeLaunch = 1;
    OK;
}
API Error cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    return snprintf(id, bytes, "0000:%02x:00.0", 7 + gpu_number(device)) < 0;
}
API Error cudaDeviceCanAccessPeer(int *can, int device, int peer) { GIVE(can, 0); }
API Error cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    GIVE(most, -5);
}
API Error cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { GIVE(pool, gpu_handle()); }
API Error cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { GIVE((size_t *)value, 0); }
/* What waits learns of a kernel that failed. */
API Error cudaDeviceSynchronize(void) { return gpu_wait_for_all(); }
API Error cudaStreamSynchronize(cudaStream_t stream) { return gpu_wait(stream); }
API Error cudaStreamQuery(cudaStream_t stream) { return gpu_is_done(stream); }
API Error cudaEventSynchronize(cudaEvent_t event) { return gpu_await_event((Event *)event); }
API Error cudaEventQuery(cudaEvent_t event) { return gpu_has_happened((Event *)event); }
API const char *cudaGetErrorName(Error error) { return gpu_error_name(error); }
API const char *cudaGetErrorString(Error error) { return cudaGetErrorName(error); }

/* Memory. */
static Error allocated(void **at, size_t bytes, int kind) {
    return (*at = gpu_allocate(bytes, kind)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
API Error cudaMalloc(void **at, size_t bytes) { return allocated(at, bytes, OF_DEVICE); }
API Error cudaMallocAsync(void **at, size_t bytes, cudaStream_t stream) { return allocated(at, bytes, OF_DEVICE); }
API Error cudaHostAlloc(void **at, size_t bytes, unsigned flags) { return allocated(at, bytes, OF_HOST); }
API Error cudaMallocHost(void **at, size_t bytes) { return allocated(at, bytes, OF_HOST); }
API Error cudaFree(void *at) { return gpu_wait_for_all(), gpu_free(at), cudaSuccess; }
API Error cudaFreeAsync(void *at, cudaStream_t stream) { return cudaFree(at); }
API Error cudaFreeHost(void *at) { return cudaFree(at); }
API Error cudaHostRegister(void *at, size_t bytes, unsigned flags) { return gpu_note(at, bytes, OF_HOST), cudaSuccess; }
API Error cudaHostUnregister(void *at) { return gpu_forget(at), cudaSuccess; }
API Error cudaHostGetDevicePointer(void **on_device, void *at, unsigned flags) { GIVE(on_device, at); }
API Error cudaGetSymbolAddress(void **at, const void *symbol) { return allocated(at, 4096, OF_DEVICE); }
API Error cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = FREE_BYTES;
    GIVE(total, TOTAL_BYTES);
}
API Error cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    int device = -2, kind = gpu_kind(at, &device);
    memset(found, 0, sizeof *found);
    found->type = kind == OF_DEVICE ? cudaMemoryTypeDevice : kind == OF_HOST ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = device;
    found->devicePointer = kind ? (void *)at : NULL;
    found->hostPointer = kind == OF_HOST ? (void *)at : NULL;
    OK;
}
API Error cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return gpu_catch_up(NULL), memmove(to, from, bytes), cudaSuccess;
}
API Error cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return gpu_copy(to, from, bytes, stream), cudaSuccess;
}
API Error cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, cudaStream_t stream) {
    return gpu_copy(to, from, bytes, stream), cudaSuccess;
}
API Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                            enum cudaMemcpyKind kind, cudaStream_t stream) {
    return gpu_copy_rows((Copy){to, from, width, height, to_pitch, from_pitch}, stream), cudaSuccess;
}
API Error cudaMemset(void *at, int value, size_t bytes) {
    return gpu_fill((Fill){at, value, 1, bytes}, NULL), cudaSuccess;
}
API Error cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    return gpu_fill((Fill){at, value, 1, bytes}, stream), cudaSuccess;
}

/* Launches, of kernels that nobody computes, and what the compiler puts around them. */
static __thread Error refused; /* until it is asked for: whoever launches does not look at the result */
static Error launched(const char *kind) { return refused = gpu_refuses(kind); }
API Error cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared, cudaStream_t stream) {
    return launched("a kernel that was compiled into a library");
}
API Error cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared,
                                      cudaStream_t stream) {
    return launched("a cooperative kernel that was compiled into a library");
}
API Error cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **values) {
    return launched("a kernel that was compiled into a library");
}
API Error cudaPeekAtLastError(void) { return refused ? refused : (Error)gpu_error(); }
API Error cudaGetLastError(void) {
    Error last = cudaPeekAtLastError();
    refused = cudaSuccess;
    return last;
}
API Error cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
    found->maxDynamicSharedSizeBytes = gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    OK;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads, size_t shared) {
    GIVE(count, 2);
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads, size_t shared,
                                                                 unsigned flags) {
    GIVE(count, 2);
}
API Error cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return gpu_call(function, argument, stream), cudaSuccess;
}
API Error cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned flags) {
    return gpu_catch_up(stream), function(stream, cudaSuccess, argument), cudaSuccess;
}
API Error cudaGetKernel(cudaKernel_t *kernel, const void *function) { GIVE(kernel, (cudaKernel_t)function); }
API Error cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol) { GIVE(function, (cudaFunction_t)symbol); }
API Error __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return cudaGetKernel(kernel, function); }
API void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
API char __cudaInitModule(void **binary) { return 1; }
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
API Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    GIVE((void **)stream, pushed.stream);
}

/* Streams, events and graphs. */
API Error cudaStreamCreate(cudaStream_t *stream) { GIVE(stream, gpu_stream(0)); }
API Error cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { GIVE(stream, gpu_stream(flags & cudaStreamNonBlocking)); }
API Error cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreateWithFlags(stream, flags);
}
API Error cudaStreamGetPriority(cudaStream_t stream, int *priority) { GIVE(priority, 0); }
API Error cudaEventCreate(cudaEvent_t *event) { GIVE(event, (cudaEvent_t)gpu_event()); }
API Error cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
API Error cudaEventDestroy(cudaEvent_t event) { OK; }
API Error cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return gpu_record((Event *)event, stream), cudaSuccess; }
API Error cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return gpu_put_behind(stream, (Event *)event), cudaSuccess;
}
API Error cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
API Error cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return gpu_elapsed((Event *)start, (Event *)end, milliseconds);
}
API Error cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) { return gpu_begin_capture(), cudaSuccess; }
API Error cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) { GIVE(graph, (cudaGraph_t)gpu_end_capture()); }
API Error cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    GIVE(status, gpu_is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone);
}
API Error cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                   const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = 1;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}
/* A graph and what can be launched of it are the same here; the latter is freed last, with the process. */
API Error cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { GIVE(made, (cudaGraphExec_t)graph); }
API Error cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    GIVE(made, (cudaGraphExec_t)graph);
}
API Error cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return gpu_run_graph((Graph *)graph, stream), cudaSuccess; }
API Error cudaGraphExecDestroy(cudaGraphExec_t graph) { return gpu_free_graph((Graph *)graph), cudaSuccess; }
API Error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { GIVE(count, 1); } /* not empty */
API Error cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *others, cudaGraphEdgeData *edges, size_t *count) {
    GIVE(count, 0);
}

/* The driver's functions by name. */
API Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *result) {
    int error = gpu_lookup(name, function);
    if (result) *result = error ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    OK;
}
API Error cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                  enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDA_RELEASE, flags, result);
}
