/* libnvidia-ml.so.1: NVML, which names the machine's GPUs and their driver. A GPU's handle is its number and 1. */

#include "gpu.h"
#include <stdio.h>

typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
enum { OK = 0, NOT_FOUND = 6, P2P_NOT_SUPPORTED = 5 };
#define GIVE(place, value) return *(place) = (value), OK
#define GIVE_TEXT(text, bytes, ...) return snprintf(text, bytes, __VA_ARGS__), OK

API int nvmlInit(void) { return OK; }
API int nvmlInit_v2(void) { return OK; }
API int nvmlInitWithFlags(unsigned flags) { return OK; }
API int nvmlShutdown(void) { return OK; }
API const char *nvmlErrorString(int error) { return "an error of the emulated GPU"; }
API int nvmlSystemGetDriverVersion(char *text, unsigned bytes) { GIVE_TEXT(text, bytes, "580.159.04"); }
API int nvmlSystemGetNVMLVersion(char *text, unsigned bytes) { GIVE_TEXT(text, bytes, "13.580.159.04"); }
API int nvmlSystemGetCudaDriverVersion(int *version) { GIVE(version, CUDA_RELEASE); }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { GIVE(version, CUDA_RELEASE); }
API int nvmlDeviceGetCount(unsigned *count) { GIVE(count, gpu_existing()); }
API int nvmlDeviceGetCount_v2(unsigned *count) { GIVE(count, gpu_existing()); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned number, size_t *device) {
    *device = number + 1;
    return number < (unsigned)gpu_existing() ? OK : NOT_FOUND;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, size_t *device) {
    unsigned number = 0;
    sscanf(uuid, "GPU-07070707-0707-0707-0707-0707070707%2x", &number);
    return nvmlDeviceGetHandleByIndex_v2(number, device);
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, size_t *device) {
    unsigned bus = 7;
    sscanf(id, "%*x:%2x:", &bus);
    return nvmlDeviceGetHandleByIndex_v2(bus - 7, device);
}
API int nvmlDeviceGetIndex(size_t device, unsigned *number) { GIVE(number, device - 1); }
API int nvmlDeviceGetName(size_t device, char *text, unsigned bytes) { GIVE_TEXT(text, bytes, NAME); }
API int nvmlDeviceGetUUID(size_t device, char *text, unsigned bytes) {
    GIVE_TEXT(text, bytes, "GPU-07070707-0707-0707-0707-0707070707%02zx", device - 1);
}
API int nvmlDeviceGetCudaComputeCapability(size_t device, int *major, int *minor) {
    *major = 9;
    GIVE(minor, 0);
}
API int nvmlDeviceGetMemoryInfo(size_t device, Memory *memory) {
    GIVE(memory, ((Memory){TOTAL_BYTES, FREE_BYTES, TOTAL_BYTES - FREE_BYTES}));
}
API int nvmlDeviceGetMemoryInfo_v2(size_t device, MemoryV2 *memory) {
    GIVE(memory, ((MemoryV2){memory->version, TOTAL_BYTES, 0, FREE_BYTES, TOTAL_BYTES - FREE_BYTES}));
}
API int nvmlDeviceGetP2PStatus(size_t device, size_t peer, int kind, int *status) { GIVE(status, P2P_NOT_SUPPORTED); }
API int nvmlDeviceGetMigMode(size_t device, unsigned *now, unsigned *pending) {
    *now = 0;
    GIVE(pending, 0);
}
