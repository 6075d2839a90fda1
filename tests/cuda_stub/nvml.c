/* A stand-in for the driver's management library: the stub's devices, of which each says something else.
 *
 * $CUDA_STUB_DIR/nvml-event  "<device> <type> <data>": met once, by whoever waits for events first
 * $CUDA_STUB_DIR/gone        the device with that number has fallen off the bus
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15 };
#define MAX_DEVICES 16

typedef struct { int number; } device_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { device_t *device; unsigned long long type, data; unsigned instance, compute; } event_t;
static device_t devices[MAX_DEVICES];
static unsigned long long wanted[MAX_DEVICES];

static FILE *open_file(const char *name) {
    char path[4096];
    const char *folder = getenv("CUDA_STUB_DIR");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : "", name);
    return fopen(path, "r");
}
static int is_gone(int number) {
    FILE *file = open_file("gone");
    int gone = -1;
    if (file) {
        if (fscanf(file, "%d", &gone) != 1)
            gone = -1;
        fclose(file);
    }
    return gone == number;
}
#define REACHED(device) if (is_gone((device)->number)) return GPU_IS_LOST

API const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "an error of the stub"; }
API int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
API int nvmlShutdown(void) { return SUCCESS; }
API int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *said = getenv("CUDA_STUB_DEVICES");
    *count = said ? (unsigned)atoi(said) : 1;
    return SUCCESS;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned number, device_t **device) {
    if (number >= MAX_DEVICES)
        return INVALID_ARGUMENT;
    devices[number].number = (int)number;
    *device = &devices[number];
    REACHED(*device);
    return SUCCESS;
}
API int nvmlDeviceGetUUID(device_t *device, char *text, unsigned length) {
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012x", device->number);
    return SUCCESS;
}
API int nvmlDeviceGetUtilizationRates(device_t *device, utilization_t *found) {
    REACHED(device);
    *found = (utilization_t){25u * (unsigned)(device->number + 1), 10};
    return SUCCESS;
}
API int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *found) {
    REACHED(device);
    *found = (memory_t){80ull << 30, 79ull << 30, 1ull << 30};
    return SUCCESS;
}
API int nvmlDeviceGetPowerUsage(device_t *device, unsigned *milliwatts) {
    REACHED(device);
    *milliwatts = 123500;
    return SUCCESS;
}
API int nvmlDeviceGetEnforcedPowerLimit(device_t *device, unsigned *milliwatts) { (void)device; *milliwatts = 700000; return SUCCESS; }
/* Some cards do not say it. */
API int nvmlDeviceGetTotalEnergyConsumption(device_t *device, unsigned long long *millijoules) {
    *millijoules = 5500;
    return device->number ? NOT_SUPPORTED : SUCCESS;
}
API int nvmlEventSetCreate(void **set) { *set = wanted; return SUCCESS; }
API int nvmlDeviceRegisterEvents(device_t *device, unsigned long long types, void *set) {
    (void)set;
    wanted[device->number] |= types;
    return SUCCESS;
}
API int nvmlEventSetWait_v2(void *set, event_t *met, unsigned milliseconds) {
    (void)set;
    for (unsigned waited = 0;; waited += 10) {
        FILE *file = open_file("nvml-event");
        if (file) {
            int number = 0;
            memset(met, 0, sizeof *met);
            int read = fscanf(file, "%d %llu %llu", &number, &met->type, &met->data);
            fclose(file);
            char path[4096];
            snprintf(path, sizeof path, "%s/nvml-event", getenv("CUDA_STUB_DIR"));
            unlink(path);
            if (read == 3 && number >= 0 && number < MAX_DEVICES && wanted[number] & met->type) {
                met->device = &devices[number];
                return SUCCESS;
            }
        }
        if (waited >= milliseconds)
            return TIMEOUT;
        usleep(10000);
    }
}
