/* A simulated GPU: what torch's CUDA build calls of the CUDA driver, the runtime, cuBLAS and NCCL.
 *
 * Loaded before torch (dlopen with RTLD_GLOBAL, or LD_PRELOAD), its functions take the place of those of
 * libcudart, libcublas, libcublasLt and libnccl; its soname makes it the driver, libcuda.so.1. The device reports the
 * properties of an H100 80 GB; SIMULATED_GPUS sets how many there are, of which a process uses one, as ranks do,
 * and SIMULATED_GPU_BYTES their memory.
 * Memory is reserved address space that is never touched, accounted in the driver's granules of 2 MiB and refused
 * when the device is full. Kernels, matrix products and collectives are counted and do nothing; other ranks need not
 * exist. Streams and events keep their order, and a capture its rules: which calls are forbidden, and that forked
 * streams join before its end. A copy to the host writes 1 if it is one number (of 1, 2, 4 or 8 bytes, read as bool,
 * bfloat16, float32 or int64), else zeros.
 *
 * Functions that are not here are the real libraries', which find no device.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define GRANULE ((size_t)2 << 20)
#define MULTIPROCESSORS 132
#define SHARED_PER_BLOCK 232448 /* with the opt-in */
#define VERSION 13000

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t report(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* ---- Settings and counts, for the test that loads this library */

static struct {
    size_t total;   /* the device's memory in bytes */
    size_t context; /* taken by the driver's context and its loaded kernels */
    bool behind;    /* events are done only when the host has waited, as if the device lags far behind */
} device = {(size_t)(79.11 * (1 << 30)), (size_t)520 << 20, false};

static int devices = 1;
static _Thread_local int current; /* index of this thread's device */

__attribute__((constructor)) static void read_environment(void) {
    const char *number = getenv("SIMULATED_GPUS"), *bytes = getenv("SIMULATED_GPU_BYTES");
    if (number)
        devices = atoi(number);
    if (bytes)
        device.total = strtoull(bytes, NULL, 10);
}

static size_t used; /* bytes of granules handed out */
static uint64_t launches, graph_launches, products, copies_to_host, waits, messages;
static uint64_t pageable[2]; /* copies to the device from memory that is not page-locked, and the other way */

void simulated_configure(size_t total, size_t context, int behind) {
    if (total)
        device.total = total;
    device.context = context;
    device.behind = behind;
}

/* Kernel and graph launches, matrix products, copies to the host, waits of the host, and calls of collectives
 * and messages, since loading. */
void simulated_counts(uint64_t counts[6]) {
    uint64_t now[6] = {launches, graph_launches, products, copies_to_host, waits, messages};
    memcpy(counts, now, sizeof now);
}

void simulated_pageable(uint64_t copies[2]) { memcpy(copies, pageable, sizeof pageable); }

/* ---- Memory: ranges of addresses, each device memory, page-locked host memory or reserved addresses */

enum { ON_DEVICE, ON_HOST, REGISTERED };
struct range {
    uintptr_t begin, end;
    int kind;
    struct range *next;
};
static struct range *ranges;

static void add_range(void *begin, size_t size, int kind) {
    struct range *range = malloc(sizeof *range);
    *range = (struct range){(uintptr_t)begin, (uintptr_t)begin + size, kind, ranges};
    ranges = range;
}

static struct range *find_range(const void *address) {
    struct range *range = ranges;
    while (range && ((uintptr_t)address < range->begin || (uintptr_t)address >= range->end))
        range = range->next;
    return range;
}

/* Forget the range that begins at an address, and return its size; 0 if there is none. */
static size_t remove_range(const void *begin, int kind) {
    for (struct range **link = &ranges; *link; link = &(*link)->next) {
        struct range *range = *link;
        if (range->begin == (uintptr_t)begin && range->kind == kind) {
            size_t size = range->end - range->begin;
            *link = range->next;
            free(range);
            return size;
        }
    }
    return 0;
}

static size_t in_granules(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }

static bool fits(size_t size) { return device.context + used + size <= device.total; }

static void *reserve_addresses(size_t size) { /* begins at a granule, as large allocations of the driver do */
    char *wide = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED)
        return NULL;
    char *begin = (char *)in_granules((size_t)wide);
    if (begin > wide)
        munmap(wide, begin - wide);
    if (begin < wide + GRANULE)
        munmap(begin + size, wide + GRANULE - begin);
    return begin;
}

static int kind_of(const void *address) { /* -1: memory of the host that is not page-locked */
    pthread_mutex_lock(&mutex);
    struct range *range = find_range(address);
    int kind = range ? range->kind : -1;
    pthread_mutex_unlock(&mutex);
    return kind;
}

/* ---- Streams, events and capture */

struct graph {
    size_t nodes;
};
struct CUstream_st {
    int priority;
    uint64_t position; /* of its last work, in the order of everything that was queued */
    uint64_t capture;  /* id of the capture that it is part of, or 0 */
    bool origin, apart; /* where the capture began; forked from it, with work that nothing has waited for */
    enum cudaStreamCaptureMode mode;
    pthread_t thread; /* that began the capture */
    bool invalid;
    struct graph *graph;
    struct CUstream_st *next;
};
struct CUevent_st {
    uint64_t position, capture;
    struct CUstream_st *stream;
    struct timespec time;
};
static struct CUstream_st legacy = {0};
static struct CUstream_st *streams = &legacy;
static uint64_t queued, done, captures;
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static struct CUstream_st *stream_of(cudaStream_t stream) {
    return (uintptr_t)stream <= 2 ? &legacy : stream; /* 1 and 2 are the default streams' other handles */
}

static void invalidate(uint64_t capture) {
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->capture == capture)
            s->invalid = true;
}

/* Return an error, and end the capture, if a call that may wait for the device is forbidden now: by a capture of
 * this thread, or by one of another that is global, as this thread's mode must be too. */
static cudaError_t unsafe_call(void) {
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    for (struct CUstream_st *s = streams; s; s = s->next) {
        bool global = s->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (s->origin && s->mode != cudaStreamCaptureModeRelaxed && (global || pthread_equal(s->thread, pthread_self()))) {
            invalidate(s->capture);
            return report(cudaErrorStreamCaptureUnsupported);
        }
    }
    return cudaSuccess;
}

/* Queue one piece of work: true if it runs, false if it becomes a node of the graph being captured. */
static bool queue(cudaStream_t handle) {
    struct CUstream_st *stream = stream_of(handle);
    stream->position = __atomic_add_fetch(&queued, 1, __ATOMIC_RELAXED);
    if (!stream->capture)
        return true;
    stream->graph->nodes++;
    stream->apart = !stream->origin;
    return false;
}

static cudaError_t host_waits(uint64_t position) {
    waits++;
    if (position > done)
        done = position;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = calloc(1, sizeof **stream);
    (*stream)->priority = priority;
    pthread_mutex_lock(&mutex);
    (*stream)->next = streams;
    streams = *stream;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { /* kept: events may still name it */
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    struct CUstream_st *stream = stream_of(handle);
    if (stream->capture) {
        invalidate(stream->capture);
        return report(cudaErrorStreamCaptureUnsupported);
    }
    cudaError_t error = unsafe_call();
    return error ? error : host_waits(stream->position);
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    struct CUstream_st *stream = stream_of(handle);
    if (stream->capture) {
        invalidate(stream->capture);
        return report(cudaErrorStreamCaptureUnsupported);
    }
    cudaError_t error = unsafe_call();
    if (error)
        return error;
    return device.behind && stream->position > done ? report(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = unsafe_call();
    return error ? error : host_waits(queued);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    struct CUstream_st *stream = stream_of(handle);
    if (event->capture && stream->capture && event->capture != stream->capture)
        return report(cudaErrorStreamCaptureMerge);
    if (stream->capture && !event->capture && event->stream)
        return report(cudaErrorStreamCaptureIsolation);
    if (event->capture && !stream->capture) {
        stream->capture = event->capture;
        stream->mode = event->stream->mode;
        stream->graph = event->stream->graph;
        stream->invalid = false;
    }
    if (event->capture && event->stream != stream) {
        if (event->stream->position == event->position)
            event->stream->apart = false;
        stream->apart = !stream->origin;
    }
    stream->position = __atomic_add_fetch(&queued, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    if (queue(stream))
        call(data);
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    if (queue(stream))
        call(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    struct CUstream_st *stream = stream_of(handle);
    event->stream = stream;
    event->capture = stream->capture;
    event->position = stream->position;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->capture)
        return report(cudaErrorCapturedEvent);
    cudaError_t error = unsafe_call();
    if (error)
        return error;
    return device.behind && event->position > done ? report(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture)
        return report(cudaErrorCapturedEvent);
    cudaError_t error = unsafe_call();
    return error ? error : host_waits(event->position);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) { /* the host's */
    *milliseconds = (end->time.tv_sec - start->time.tv_sec) * 1e3f + (end->time.tv_nsec - start->time.tv_nsec) * 1e-6f;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    struct CUstream_st *stream = stream_of(handle);
    if (stream == &legacy)
        return report(cudaErrorStreamCaptureUnsupported);
    if (stream->capture)
        return report(cudaErrorIllegalState);
    stream->capture = ++captures;
    stream->origin = true;
    stream->mode = mode;
    stream->thread = pthread_self();
    stream->invalid = false;
    stream->graph = calloc(1, sizeof *stream->graph);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    struct CUstream_st *stream = stream_of(handle);
    if (!stream->origin)
        return report(stream->capture ? cudaErrorStreamCaptureUnmatched : cudaErrorIllegalState);
    cudaError_t error = stream->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    uint64_t capture = stream->capture;
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->capture == capture) {
            if (s->apart && !error)
                error = cudaErrorStreamCaptureUnjoined;
            s->capture = 0;
            s->origin = s->apart = s->invalid = false;
        }
    *graph = error ? NULL : (cudaGraph_t)stream->graph;
    return report(error);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                     size_t *number) {
    struct CUstream_st *stream = stream_of(handle);
    *status = !stream->capture ? cudaStreamCaptureStatusNone
              : stream->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id)
        *id = stream->capture;
    if (graph)
        *graph = (cudaGraph_t)stream->graph;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (number)
        *number = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamGetCaptureInfo(stream, status, NULL, NULL, NULL, NULL, NULL);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *instance, cudaGraph_t graph, unsigned long long flags) {
    *instance = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
    graph_launches++;
    queue(stream);
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    if (nodes)
        return report(cudaErrorNotSupported);
    *number = ((struct graph *)graph)->nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) { return cudaSuccess; }

/* ---- Allocation */

cudaError_t cudaMalloc(void **address, size_t size) {
    cudaError_t error = unsafe_call();
    if (error)
        return error;
    size = in_granules(size);
    pthread_mutex_lock(&mutex);
    *address = fits(size) ? reserve_addresses(size) : NULL;
    if (*address) {
        used += size;
        add_range(*address, size, ON_DEVICE);
    }
    pthread_mutex_unlock(&mutex);
    return *address || !size ? cudaSuccess : report(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
    cudaError_t error = unsafe_call();
    if (error || !address)
        return error;
    host_waits(queued);
    pthread_mutex_lock(&mutex);
    size_t size = remove_range(address, ON_DEVICE);
    used -= size;
    pthread_mutex_unlock(&mutex);
    if (!size)
        return report(cudaErrorInvalidValue);
    munmap(address, size);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    cudaError_t error = unsafe_call();
    if (error)
        return error;
    *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*address == MAP_FAILED)
        return report(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&mutex);
    add_range(*address, size, ON_HOST);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *address) {
    pthread_mutex_lock(&mutex);
    size_t size = remove_range(address, ON_HOST);
    pthread_mutex_unlock(&mutex);
    if (!size)
        return report(cudaErrorInvalidValue);
    munmap(address, size);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    pthread_mutex_lock(&mutex);
    add_range(address, size, REGISTERED);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
    pthread_mutex_lock(&mutex);
    size_t size = remove_range(address, REGISTERED);
    pthread_mutex_unlock(&mutex);
    return size ? cudaSuccess : report(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = device.total;
    *available = device.total - device.context - used;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    int kind = kind_of(address);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = kind == -1 ? cudaInvalidDeviceId : current;
    attributes->type = kind == -1 ? cudaMemoryTypeUnregistered : kind == ON_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->devicePointer = kind == -1 ? NULL : (void *)address;
    attributes->hostPointer = kind == ON_DEVICE ? NULL : (void *)address;
    return cudaSuccess;
}

/* ---- Copies */

static void write_host(void *to, size_t size) {
    static const int64_t integer = 1;
    static const float number = 1;
    static const uint16_t half = 0x3f80;
    copies_to_host++;
    if (size == 8)
        memcpy(to, &integer, 8);
    else if (size == 4)
        memcpy(to, &number, 4);
    else if (size == 2)
        memcpy(to, &half, 2);
    else
        memset(to, size == 1, size);
}

static void copy(void *to, const void *from, size_t size) {
    if (!size)
        return;
    int target = kind_of(to), source = kind_of(from);
    if (target == ON_DEVICE) {
        pageable[0] += source == -1;
    } else if (source == ON_DEVICE) {
        pageable[1] += target == -1;
        write_host(to, size);
    } else {
        memmove(to, from, size);
    }
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    queue(stream);
    copy(to, from, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = unsafe_call();
    if (error)
        return error;
    queue(NULL);
    copy(to, from, size);
    return host_waits(queued);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    queue(stream);
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                               enum cudaMemcpyKind kind) {
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    queue(stream);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *address, int value, size_t size) { return cudaMemsetAsync(address, value, size, NULL); }

/* ---- The device */

cudaError_t cudaGetDeviceCount(int *number) {
    *number = devices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *index) {
    *index = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
    if (index < 0 || index >= devices)
        return report(cudaErrorInvalidDevice);
    current = index;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceCanAccessPeer(int *able, int index, int peer) {
    *able = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int index) {
    snprintf(text, size, "0000:%02x:00.0", index + 1);
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int index) {
    *properties = (struct cudaDeviceProp){
        .name = "Simulated NVIDIA H100 80GB HBM3",
        .uuid = {{'s', 'i', 'm', (char)index}},
        .totalGlobalMem = device.total,
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .memPitch = INT32_MAX,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {INT32_MAX, 65535, 65535},
        .totalConstMem = 65536,
        .major = 9,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .multiProcessorCount = MULTIPROCESSORS,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .pciBusID = index + 1,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = 50 << 20,
        .persistingL2CacheMaxSize = 32 << 20,
        .maxThreadsPerMultiProcessor = 2048,
        .streamPrioritiesSupported = 1,
        .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerMultiprocessor = 65536,
        .managedMemory = 1,
        .concurrentManagedAccess = 1,
        .computePreemptionSupported = 1,
        .canUseHostPointerForRegisteredMem = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = SHARED_PER_BLOCK,
        .maxBlocksPerMultiProcessor = 32,
        .reservedSharedMemPerBlock = 1024,
        .hostRegisterSupported = 1,
        .clusterLaunch = 1,
        .unifiedFunctionPointers = 1,
    };
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY:
        *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = INT32_MAX; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_PER_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrAsyncEngineCount: *value = 3; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrClusterLaunch: case cudaDevAttrHostRegisterSupported: case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED:
        *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- Kernels: the handle of a kernel is the host's function of its name */

struct kernel {
    const void *function;
    const char *name;
    uint64_t launches;
};
static struct kernel *kernels; /* a hash table with open addresses, less than half full */
static size_t kernel_slots, kernel_number;

static struct kernel *kernel_slot(const void *function) {
    size_t slot = ((uintptr_t)function * 0x9e3779b97f4a7c15u >> 20) & (kernel_slots - 1);
    while (kernels[slot].function && kernels[slot].function != function)
        slot = (slot + 1) & (kernel_slots - 1);
    return &kernels[slot];
}

static void register_kernel(const void *function, const char *name) {
    if (2 * kernel_number >= kernel_slots) {
        struct kernel *before = kernels;
        size_t slots = kernel_slots;
        kernel_slots = slots ? 2 * slots : 1 << 12;
        kernels = calloc(kernel_slots, sizeof *kernels);
        for (size_t i = 0; i < slots; i++)
            if (before[i].function)
                *kernel_slot(before[i].function) = before[i];
        free(before);
    }
    struct kernel *kernel = kernel_slot(function);
    kernel_number += !kernel->function;
    kernel->function = function;
    kernel->name = name;
}

static cudaError_t launch(const void *function, cudaStream_t stream) {
    pthread_mutex_lock(&mutex);
    if (!kernels || !kernel_slot(function)->function)
        register_kernel(function, "unknown");
    kernel_slot(function)->launches++;
    launches++;
    pthread_mutex_unlock(&mutex);
    queue(stream);
    return cudaSuccess;
}

/* Write a line with the launches and the name of each kernel that was launched. */
int simulated_write_kernels(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file)
        return -1;
    for (size_t slot = 0; slot < kernel_slots; slot++)
        if (kernels[slot].launches)
            fprintf(file, "%llu %s\n", (unsigned long long)kernels[slot].launches, kernels[slot].name);
    return fclose(file);
}

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size,
                       int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp) {
    pthread_mutex_lock(&mutex);
    register_kernel(function, name);
    pthread_mutex_unlock(&mutex);
}

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch(kernel, stream);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch(function, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(function, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(function, config->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = 90,
        .binaryVersion = 90,
        .maxDynamicSharedSizeBytes = SHARED_PER_BLOCK,
    };
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                            int index) {
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2048 / threads;
    if (shared && 233472 / (shared + 1024) < (size_t)*blocks)
        *blocks = 233472 / (shared + 1024);
    if (*blocks > 32)
        *blocks = 32;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

/* ---- The driver's interface: contexts, modules that were compiled at run time, and mapped memory */

static struct CUctx_st {
    int unused;
} context;
static bool context_exists;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *index, int ordinal) {
    *index = ordinal;
    return ordinal < devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetCount(int *number) { return (CUresult)cudaGetDeviceCount(number); }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice index) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, index);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice index, unsigned *flags, int *active) {
    *flags = 0;
    *active = context_exists || used;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice index) {
    context_exists = true;
    *out = &context;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *out) {
    *out = &context;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext current) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext current) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *out) { return cuCtxGetCurrent(out); }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the simulated driver";
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext *)out = &context;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)out = address;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = calloc(1, sizeof(void *));
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned number, CUjit_option *options,
                            void **values) {
    return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = malloc(1);
    pthread_mutex_lock(&mutex);
    register_kernel(*function, strdup(name));
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    return (CUresult)launch(function, stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    return (CUresult)launch(function, config->hStream);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **arguments) {
    return (CUresult)launch(function, stream);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    return CUDA_SUCCESS;
}

struct granules { /* physical memory that the allocator's expandable segments map */
    size_t size;
    unsigned references;
};
struct mapping {
    CUdeviceptr begin;
    struct granules *granules;
    struct mapping *next;
};
static struct mapping *mappings;

static void release(struct granules *granules) {
    if (!--granules->references) {
        used -= granules->size;
        free(granules);
    }
}

CUresult cuMemGetAllocationGranularity(size_t *granule, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
    *granule = GRANULE;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    void *begin = reserve_addresses(size);
    if (!begin)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    add_range(begin, size, ON_DEVICE);
    pthread_mutex_unlock(&mutex);
    *address = (CUdeviceptr)begin;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&mutex);
    size_t found = remove_range((void *)address, ON_DEVICE);
    pthread_mutex_unlock(&mutex);
    munmap((void *)address, found);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    pthread_mutex_lock(&mutex); /* during a capture too: torch's expandable segments then grow */
    bool enough = fits(size);
    used += enough ? size : 0;
    pthread_mutex_unlock(&mutex);
    if (!enough)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct granules *granules = malloc(sizeof *granules);
    *granules = (struct granules){size, 1};
    *handle = (CUmemGenericAllocationHandle)granules;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&mutex);
    release((struct granules *)handle);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    struct mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&mutex);
    *mapping = (struct mapping){address, (struct granules *)handle, mappings};
    mapping->granules->references++;
    mappings = mapping;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&mutex);
    for (struct mapping **link = &mappings; *link;) {
        struct mapping *mapping = *link;
        if (mapping->begin < address || mapping->begin >= address + size) {
            link = &mapping->next;
            continue;
        }
        release(mapping->granules);
        *link = mapping->next;
        free(mapping);
    }
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t number) {
    return CUDA_SUCCESS;
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *function = dlsym(library, versioned);
    if (!*function)
        *function = dlsym(library, name);
    if (!*function)
        *function = not_supported;
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- cuBLAS: status 0 is success; a product's arguments are of no interest */

static int handle_of_cublas;

int cublasCreate_v2(void **handle) {
    *handle = &handle_of_cublas;
    return 0;
}
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
#define SUCCEED(name) \
    int name(void) { return 0; }
SUCCEED(cublasDestroy_v2)
SUCCEED(cublasSetStream_v2)
SUCCEED(cublasSetWorkspace_v2)
SUCCEED(cublasSetMathMode)
SUCCEED(cublasSetPointerMode_v2)
SUCCEED(cublasSetSmCountTarget)
SUCCEED(cublasLtMatmulDescSetAttribute)
SUCCEED(cublasLtMatrixLayoutSetAttribute)
SUCCEED(cublasLtMatmulPreferenceSetAttribute)
SUCCEED(cublasLtMatmulDescDestroy)
SUCCEED(cublasLtMatrixLayoutDestroy)
SUCCEED(cublasLtMatmulPreferenceDestroy)
#define CREATE(name) \
    int name(void **out) { \
        *out = &handle_of_cublas; \
        return 0; \
    }
CREATE(cublasLtMatmulDescCreate)
CREATE(cublasLtMatrixLayoutCreate)
CREATE(cublasLtMatmulPreferenceCreate)

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *number) {
    memset(results, 0, 96); /* one algorithm (64 bytes), its workspace of 0 bytes, status, waves */
    *number = 1;
    return 0;
}

/* A product is work of the stream of its handle; torch sets a stream before each, so it is not followed. */
#define PRODUCT(name) \
    int name(void) { \
        __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED); \
        return 0; \
    }
#define PRODUCTS(name) PRODUCT(cublasS##name) PRODUCT(cublasD##name) PRODUCT(cublasC##name) PRODUCT(cublasZ##name)
PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasDotEx)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCTS(gemm_v2)
PRODUCTS(gemv_v2)
PRODUCTS(gemmStridedBatched)
PRODUCTS(trsm_v2)
PRODUCTS(trsmBatched)

/* ---- NCCL: communicators whose other ranks do not exist */

struct communicator {
    int ranks, rank;
};
struct unique_id { /* passed by value */
    char bytes[128];
};

static int new_communicator(struct communicator **out, int ranks, int rank) {
    *out = malloc(sizeof **out);
    **out = (struct communicator){ranks, rank};
    return 0;
}

int ncclGetUniqueId(struct unique_id *id) {
    memset(id, 1, sizeof *id);
    return 0;
}
int ncclCommInitRank(struct communicator **out, int ranks, struct unique_id id, int rank) {
    return new_communicator(out, ranks, rank);
}
int ncclCommInitRankConfig(struct communicator **out, int ranks, struct unique_id id, int rank, void *config) {
    return new_communicator(out, ranks, rank);
}
int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, void *id, void *config) {
    return new_communicator(out, ranks, rank);
}
int ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **out, void *config) {
    return new_communicator(out, whole->ranks, key);
}
int ncclCommCount(struct communicator *communicator, int *ranks) {
    *ranks = communicator->ranks;
    return 0;
}
int ncclCommUserRank(struct communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}
int ncclCommGetAsyncError(struct communicator *communicator, int *error) { return *error = 0; }
SUCCEED(ncclCommAbort)
SUCCEED(ncclCommDestroy)
SUCCEED(ncclCommFinalize)
SUCCEED(ncclGroupStart)
SUCCEED(ncclGroupEnd)

static int message(cudaStream_t stream) {
    __atomic_add_fetch(&messages, 1, __ATOMIC_RELAXED);
    queue(stream);
    return 0;
}

int ncclAllReduce(void *from, void *to, size_t n, int type, int operation, void *communicator, cudaStream_t stream) {
    return message(stream);
}
int ncclReduceScatter(void *from, void *to, size_t n, int type, int operation, void *communicator,
                      cudaStream_t stream) {
    return message(stream);
}
int ncclReduce(void *from, void *to, size_t n, int type, int operation, int root, void *communicator,
               cudaStream_t stream) {
    return message(stream);
}
int ncclBroadcast(void *from, void *to, size_t n, int type, int root, void *communicator, cudaStream_t stream) {
    return message(stream);
}
int ncclBcast(void *buffer, size_t n, int type, int root, void *communicator, cudaStream_t stream) {
    return message(stream);
}
int ncclAllGather(void *from, void *to, size_t n, int type, void *communicator, cudaStream_t stream) {
    return message(stream);
}
int ncclAlltoAll(void *from, void *to, size_t n, int type, void *communicator, cudaStream_t stream) {
    return message(stream);
}
int ncclSend(void *buffer, size_t n, int type, int peer, void *communicator, cudaStream_t stream) {
    return message(stream);
}
int ncclRecv(void *buffer, size_t n, int type, int peer, void *communicator, cudaStream_t stream) {
    return message(stream);
}
