/* The management library of the simulated GPU: what torch asks of libnvidia-ml.so.1. No NVLink, no fabric. */
#include <string.h>

#define NOT_SUPPORTED 3

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *number) {
    *number = 1;
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = device;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *number, void *processes) {
    *number = 0;
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) {
    memset((char *)info + 4, 0, 25); /* after the version: cluster, status, clique, and the state, unsupported */
    return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
