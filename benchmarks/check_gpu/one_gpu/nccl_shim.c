/* vLLM 0.33 asks NCCL for two functions that came with 2.29.7, and does without NCCL where they are missing. It never
   calls them unless it is put to sleep. Linked to the NCCL that is there, this says that they are not supported. */
int ncclCommSuspend(void *communicator, int flags) { return 5; }
int ncclCommResume(void *communicator) { return 5; }
