/* libcuda.so.1: CUDA's driver. What is not defined here is a stub, made from the names in cuda.h. */

#include "gpu.h"
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define OK return CUDA_SUCCESS
#define GIVE(place, value) \
    do { *(place) = (value); OK; } while (0)
#define PAGE ((size_t)2 << 20) /* of virtual memory */
static CUcontext context_of(int device) { return (CUcontext)(0x1000 + (size_t)device); }

/* Devices and contexts: a device has one, which is its primary one. */
API CUresult cuDriverGetVersion(int *version) { GIVE(version, CUDA_RELEASE); }
API CUresult cuDeviceGetCount(int *count) { GIVE(count, gpu_count()); }
API CUresult cuDeviceGet(CUdevice *device, int number) {
    if (number < 0 || number >= gpu_count()) return CUDA_ERROR_INVALID_DEVICE;
    GIVE(device, number);
}
API CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) { return snprintf(name, bytes, NAME) < 0; }
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 7, sizeof *uuid);
    GIVE(&uuid->bytes[15], gpu_number(device));
}
API CUresult cuDeviceGetPCIBusId(char *id, int bytes, CUdevice device) {
    return snprintf(id, bytes, "0000:%02x:00.0", 7 + gpu_number(device)) < 0;
}
API CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) { GIVE(bytes, TOTAL_BYTES); }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    GIVE(value, gpu_attribute(attribute));
}
// memory of all devices is the host's
API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) { GIVE(can, 1); }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { GIVE(context, context_of(device)); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    GIVE(is_active, 1);
}
API CUresult cuCtxGetCurrent(CUcontext *context) { GIVE(context, context_of(gpu_current())); }
API CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) gpu_choose((size_t)context - (size_t)context_of(0));
    OK;
}
API CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
API CUresult cuCtxPopCurrent(CUcontext *context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *device) { GIVE(device, gpu_current()); }
API CUresult cuCtxGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    GIVE(most, -5);
}
API CUresult cuGetErrorName(CUresult error, const char **name) { GIVE(name, gpu_error_name(error)); }
API CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* Memory. */
static CUresult allocated(void **at, size_t bytes, int kind) {
    return (*at = gpu_allocate(bytes, kind)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAlloc(CUdeviceptr *at, size_t bytes) { return allocated((void **)at, bytes, OF_DEVICE); }
API CUresult cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream stream) { return cuMemAlloc(at, bytes); }
API CUresult cuMemFree(CUdeviceptr at) { return gpu_wait_for_all(), gpu_free((void *)at), CUDA_SUCCESS; }
API CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream) { return cuMemFree(at); }
API CUresult cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { return allocated(at, bytes, OF_HOST); }
API CUresult cuMemFreeHost(void *at) { return gpu_free(at), CUDA_SUCCESS; }
API CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = FREE_BYTES;
    GIVE(total, TOTAL_BYTES);
}
API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at) {
    int device = 0, kind = gpu_kind((void *)at, &device);
    if (!kind) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: GIVE((unsigned *)value, kind);
    case CU_POINTER_ATTRIBUTE_CONTEXT: GIVE((CUcontext *)value, context_of(device));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: GIVE((CUdeviceptr *)value, at);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: GIVE((void **)value, (void *)at);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: GIVE((int *)value, device);
    default: GIVE((int *)value, 0);
    }
}

/* Copies. Those that block come behind the default stream. */
API CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    return gpu_catch_up(NULL), memcpy((void *)to, from, bytes), CUDA_SUCCESS;
}
API CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    return gpu_catch_up(NULL), memcpy(to, (void *)from, bytes), CUDA_SUCCESS;
}
#define COPIES(name, to_type, from_type) \
    API CUresult name(to_type to, from_type from, size_t bytes, CUstream stream) { \
        gpu_copy((void *)to, (const void *)from, bytes, stream); \
        OK; \
    }
COPIES(cuMemcpyHtoDAsync, CUdeviceptr, const void *)
COPIES(cuMemcpyDtoHAsync, void *, CUdeviceptr)
COPIES(cuMemcpyDtoDAsync, CUdeviceptr, CUdeviceptr)
COPIES(cuMemcpyAsync, CUdeviceptr, CUdeviceptr)
#define FILLS(name, value_type, stream, stream_parameter) \
    API CUresult name(CUdeviceptr at, value_type value, size_t count stream_parameter) { \
        gpu_fill((Fill){(void *)at, value, sizeof value, count}, stream); \
        OK; \
    }
#define IN_STREAM , CUstream stream
FILLS(cuMemsetD8, unsigned char, NULL, )
FILLS(cuMemsetD8Async, unsigned char, stream, IN_STREAM)
FILLS(cuMemsetD16Async, unsigned short, stream, IN_STREAM)
FILLS(cuMemsetD32Async, unsigned, stream, IN_STREAM)

/* Virtual memory: an allocation is a file in memory, its handle the descriptor, mapped wherever it is asked to be. */
API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags flags) {
    GIVE(bytes, PAGE);
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p, unsigned long long flags) {
    int file = memfd_create("emulated_gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    GIVE(handle, file);
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return close((int)handle), CUDA_SUCCESS; }
API CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                          unsigned long long flags) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    GIVE((int *)shared, dup((int)handle));
}
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    GIVE(handle, dup((int)(size_t)shared));
}
API CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    char *found = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t before = (PAGE - (size_t)found % PAGE) % PAGE;
    if (before) munmap(found, before);
    munmap(found + before + bytes, PAGE - before);
    gpu_note(found + before, bytes, OF_DEVICE);
    GIVE(at, (CUdeviceptr)(found + before));
}
API CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) { return gpu_free((void *)at), CUDA_SUCCESS; }
static CUresult mapped(CUdeviceptr at, size_t bytes, int protection, int flags, int file, size_t offset) {
    void *found = mmap((void *)at, bytes, protection, flags | MAP_FIXED, file, offset);
    return found == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return mapped(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)handle, offset);
}
API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    return mapped(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* Modules and launches. */
API CUresult cuModuleLoad(CUmodule *module, const char *path) { GIVE(module, gpu_handle()); }
API CUresult cuModuleLoadData(CUmodule *module, const void *image) { GIVE(module, gpu_handle()); }
API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
    GIVE(module, gpu_handle());
}
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    GIVE(function, (CUfunction)gpu_function(name));
}
API CUresult cuModuleGetGlobal(CUdeviceptr *at, size_t *bytes, CUmodule module, const char *name) {
    if (bytes) *bytes = 4096;
    return at ? cuMemAlloc(at, 4096) : CUDA_SUCCESS;
}
API CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned n,
                               CUlibraryOption *more, void **more_values, unsigned m) {
    GIVE(library, gpu_handle());
}
API CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values, unsigned n,
                                   CUlibraryOption *more, void **more_values, unsigned m) {
    GIVE(library, gpu_handle());
}
API CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) { GIVE(kernel, (CUkernel)gpu_function(name)); }
API CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library) { GIVE(count, 1); }
API CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned count, CUlibrary library) {
    GIVE(kernels, (CUkernel)gpu_function("the kernel of a library"));
}
API CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) { GIVE(function, (CUfunction)kernel); }
API CUresult cuFuncGetName(const char **name, CUfunction function) { GIVE(name, gpu_name((Function *)function)); }
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: GIVE(value, 1024);
    case CU_FUNC_ATTRIBUTE_NUM_REGS: GIVE(value, 32);
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: GIVE(value, 90);
    default: GIVE(value, 0);
    }
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t shared) {
    GIVE(count, 2);
}
API CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *launch) {
    GIVE(count, MULTIPROCESSORS / 2);
}
API CUresult cuLaunchKernel(CUfunction function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned u, unsigned v,
                            unsigned shared, CUstream stream, void **values, void **extra) {
    return gpu_launch((Function *)function, grid * y * z, threads * u * v, values, stream);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **values, void **extra) {
    return gpu_launch((Function *)function, c->gridDimX * c->gridDimY * c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ,
                      values, c->hStream);
}
API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned u,
                                       unsigned v, unsigned shared, CUstream stream, void **values) {
    return gpu_launch((Function *)function, grid * y * z, threads * u * v, values, stream);
}
API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    return gpu_call(function, argument, stream), CUDA_SUCCESS;
}

/* Streams and events. */
API CUresult cuStreamCreate(CUstream *stream, unsigned flags) { GIVE(stream, gpu_stream(flags & CU_STREAM_NON_BLOCKING)); }
API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { return cuCtxGetCurrent(context); }
API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    GIVE(status, gpu_is_capturing() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE);
}
API CUresult cuEventCreate(CUevent *event, unsigned flags) { GIVE(event, (CUevent)gpu_event()); }
API CUresult cuEventDestroy(CUevent event) { OK; }
API CUresult cuEventRecord(CUevent event, CUstream stream) { return gpu_record((Event *)event, stream), CUDA_SUCCESS; }
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return gpu_put_behind(stream, (Event *)event), CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    return gpu_elapsed((Event *)start, (Event *)end, milliseconds);
}

/* What waits learns of a kernel that failed. */
API CUresult cuCtxSynchronize(void) { return gpu_wait_for_all(); }
API CUresult cuStreamSynchronize(CUstream stream) { return gpu_wait(stream); }
API CUresult cuStreamQuery(CUstream stream) { return gpu_is_done(stream); }
API CUresult cuEventSynchronize(CUevent event) { return gpu_await_event((Event *)event); }
API CUresult cuEventQuery(CUevent event) { return gpu_has_happened((Event *)event); }

/* Functions by name, in their newest form. */
API int gpu_lookup(const char *name, void **function) {
    static void *own;
    if (!own) own = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    static const char *forms[] = {"_v4", "_v3", "_v2", ""};
    for (int n = 0; n < 4; n++) {
        char versioned[256];
        snprintf(versioned, sizeof versioned, "%s%s", name, forms[n]);
        if ((*function = dlsym(own, versioned))) return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}
API int gpu_lacks(const char *name) {
    if (getenv("EMULATED_GPU_TRACE")) fprintf(stderr, "emulated GPU: %s is not supported\n", name);
    return CUDA_ERROR_NOT_SUPPORTED;
}
API const char *gpu_error_name(int error) {
    if (error == CUDA_ERROR_NOT_SUPPORTED) return "the emulated GPU has no values for what was called, or does not know it";
    return error ? "an error of the emulated GPU" : "success";
}
API int gpu_refuses(const char *name) {
    fprintf(stderr, "emulated GPU: nobody computes %s\n", name);
    return CUDA_ERROR_NOT_SUPPORTED;
}
#undef cuGetProcAddress
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *result) {
    int error = gpu_lookup(name, function);
    if (result) *result = error ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
    return error;
}
API CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    return gpu_lookup(name, function);
}
