/* libcublasLt.so.13: handles, and one algorithm for everything. Products are stubs that are refused, made from the names in the real one. */

#include "gpu.h"
#include <string.h>

#define GIVE(place, value) return *(place) = (value), 0
#define BYTES_OF_HEURISTIC 64 /* at least one result, which is all zeros: no work space */

API int cublasLtCreate(void **handle) { GIVE(handle, gpu_handle()); }
API size_t cublasLtGetVersion(void) { return 130100; }
API int cublasLtMatmulDescCreate(void **description, int compute, int scale) { GIVE(description, gpu_handle()); }
API int cublasLtMatrixLayoutCreate(void **layout, int type, size_t rows, size_t columns, long stride) {
    GIVE(layout, gpu_handle());
}
API int cublasLtMatmulPreferenceCreate(void **preference) { GIVE(preference, gpu_handle()); }
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int most,
                                       void *results, int *count) {
    memset(results, 0, BYTES_OF_HEURISTIC);
    GIVE(count, 1);
}
API const char *cublasLtGetStatusName(int status) { return "an error of the emulated GPU"; }
API const char *cublasLtGetStatusString(int status) { return "an error of the emulated GPU"; }
