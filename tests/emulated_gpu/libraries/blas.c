/* libcublas.so.13: what it says of itself. Products are stubs that are refused, made from the names in the real one. */

#include "gpu.h"

#define GIVE(place, value) return *(place) = (value), 0
#define HANDLE ((void *)0x500)

API int cublasCreate_v2(void **handle) { GIVE(handle, HANDLE); }
API int cublasGetVersion_v2(void *handle, int *version) { GIVE(version, 130100); }
API size_t cublasGetCudartVersion(void) { return CUDA_RELEASE; }
API int cublasGetStream_v2(void *handle, void **stream) { GIVE(stream, NULL); }
API int cublasGetPointerMode_v2(void *handle, int *mode) { GIVE(mode, 0); }
API int cublasGetMathMode(void *handle, int *mode) { GIVE(mode, 0); }
API int cublasGetProperty(int property, int *value) { GIVE(value, property == 0 ? 13 : 1); }
API int cublasGetSmCountTarget(void *handle, int *count) { GIVE(count, MULTIPROCESSORS); }
API const char *cublasGetStatusName(int status) { return "an error of the emulated GPU"; }
API const char *cublasGetStatusString(int status) { return "an error of the emulated GPU"; }
