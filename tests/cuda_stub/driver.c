/* A stand-in for libcuda.so.1 on hosts without a GPU, written against the public driver API.
 *
 * "Device memory" is a file in $CUDA_STUB_DIR, so that a second process can open what a first one exported:
 *
 *     <pid>-<id>   | control page: owner, byte size, device, freed | contents, a multiple of 2 MiB |
 *     host-<pid>   | what a process has page-locked, and what it copied from and to such memory, and from and to other memory |
 *                  | at 64: how often it called each function |
 *
 * Devices have numbers from 0 and UUIDs: GPU-00000000-0000-0000-0000-00000000000N is device N. Of the real thing it keeps: one
 * primary context a device, which a thread must make current; handles that cannot be opened by the process that made them; counted
 * openings; small allocations that begin within a block of 2 MiB; streams that run beside their caller, in order; events between
 * streams; errors that stay ("sticky") in a context once the device has failed, and devices that stay broken; host memory that is
 * registered only where the process may write to it, and as read-only where the device says so; copies that begin in registered
 * memory and end outside of it are refused. What it is stricter about: a copy that is not waited for has not happened
 * ($CUDA_STUB_DELAY_US makes that visible); memory that is unmapped before it is unregistered is counted ("violations"); and with
 * $CUDA_STUB_HIDDEN device pointers cannot be touched by host code at all. README.md says what it cannot show.
 *
 *     $CUDA_STUB_DIR       must be set, or there is no device
 *     $CUDA_STUB_DEVICES   how many devices (1); $CUDA_VISIBLE_DEVICES picks among them, by index or by the beginning of a UUID
 *     $CUDA_STUB_VERSION   what cuDriverGetVersion says (12080)
 *     $CUDA_STUB_UNIFIED   host memory passes for a device's as well: XLA:CPU plays XLA on a GPU
 *     $CUDA_STUB_DELAY_US  how long each queued copy takes (0)
 *     $CUDA_STUB_READ_ONLY host memory that is only read can be registered as such, and the device's attribute says so
 *     $CUDA_STUB_PEERS     devices have access to each other: handles of one's memory open in a context of another
 *     $CUDA_STUB_LOCKABLE  how many bytes the system lets a process register (all)
 *     $CUDA_STUB_FREED     what a copy of memory finds that its owner has freed: "refused" (when it is asked for), "fault" (when its
 *                          turn comes, and the context is lost), "there" (the former bytes)
 *     $CUDA_STUB_DIR/gone  the number of a device that has fallen off the bus: every context on it fails, and it is not seen any more
 *     $CUDA_STUB_DIR/fail  "<function> <error code> <calls to let pass> <1: of GPU workers only>": the next call after those fails, once
 *     $CUDA_STUB_DIR/hold  "<function>": the next call of it, in any process, makes "held" of this file and waits until that is gone
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define PAGE 4096u
#define GRANULE (2u << 20)
#define MAX_DEVICES 16
#define VERSION 12080

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, ALREADY_MAPPED = 208, PEER_ACCESS_UNSUPPORTED = 217, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, HOST_ALREADY_REGISTERED = 712, HOST_NOT_REGISTERED = 713, NOT_SUPPORTED = 801, UNKNOWN = 999,
};
enum { REGISTER_PORTABLE = 1, REGISTER_DEVICE_MAP = 2, REGISTER_READ_ONLY = 8 };

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct { char bytes[64]; } CUipcMemHandle;
typedef struct { char bytes[16]; } CUuuid;

typedef struct { char magic[8]; int32_t owner; uint32_t id; } handle_t;
typedef struct { uint64_t byte_size; int32_t device, freed; } control_t;

typedef struct { char name[40]; uint64_t count; } calls_t;
enum { MAX_CALLS = 80 };
typedef struct {
    uint64_t locked, registered, locked_copied, other_copied, violations, queued, waited, at_once;
    calls_t calls[MAX_CALLS];
} host_t;
_Static_assert(sizeof(host_t) <= PAGE, "one page a process");

typedef struct allocation {
    char *base, *block; /* its first byte, and of the file's mapping */
    uint64_t byte_size, mapped;
    control_t *control;
    int fd, imported, openings, device;
    int32_t owner;
    uint32_t id;
    struct allocation *next;
} allocation_t;

typedef struct event {
    uint64_t recorded, reached; /* tickets */
} event_t;

typedef struct task {
    enum { COPY, FILL, RECORD, WAIT } kind;
    uint64_t to, from, count;
    unsigned char value;
    event_t *event;
    uint64_t ticket;
    struct task *next;
} task_t;

typedef struct context {
    int device, retained;
    CUresult lost; /* the error that stays */
} context_t;

typedef struct stream {
    pthread_t thread;
    context_t *context;
    task_t *first, *last;
    int busy, closing, of_xla;
} stream_t;

typedef struct pinned {
    char *start;
    size_t byte_size;
    context_t *only; /* who knows it; NULL: all */
    struct pinned *next;
} pinned_t;

/* One lock for everything: nothing here has to be fast. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static allocation_t *allocations;
static pinned_t *pinned;
static context_t contexts[MAX_DEVICES];
static int visible[MAX_DEVICES], visible_count, initialized, hidden, unified, delay_us, read_only, peers;
static enum { REFUSED, FAULT, THERE } freed;
static uint64_t lockable = UINT64_MAX;
static uint32_t next_id;
static char folder[512];
static host_t nowhere, *host = &nowhere;
static __thread context_t *current;

/* ---------------------------------------------------------------------------------------------------- errors */

static int is_sticky(CUresult code) {
    return code == 214 || code == 220 || code == 702 || code == 710 || (code >= 714 && code <= 719) || code == ILLEGAL_ADDRESS;
}

/* The device that has fallen off the bus; -1: none has. */
static int gone(void) {
    char path[600];
    int device = -1;
    snprintf(path, sizeof path, "%s/gone", folder);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%d", &device) != 1)
            device = -1;
        fclose(file);
    }
    return device;
}

/* The error that stays in the calling thread's context. */
static CUresult lost(void) {
    if (current && !current->lost && gone() == current->device)
        current->lost = UNKNOWN;
    return current ? current->lost : SUCCESS;
}

static void count(const char *function) {
    static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&counting);
    for (int i = 0; i < MAX_CALLS; i++) {
        calls_t *calls = &host->calls[i];
        if (!calls->name[0])
            snprintf(calls->name, sizeof calls->name, "%s", function);
        if (!strcmp(calls->name, function)) {
            calls->count++;
            break;
        }
    }
    pthread_mutex_unlock(&counting);
}

/* Waits where somebody holds this function up: for two minutes at most, so that a test that never lets go fails. */
static CUresult hold(const char *function) {
    char path[600], held[600], name[128] = "";
    snprintf(path, sizeof path, "%s/hold", folder);
    FILE *file = fopen(path, "r");
    if (!file)
        return SUCCESS;
    int read = fscanf(file, "%127s", name);
    fclose(file);
    snprintf(held, sizeof held, "%s/held", folder);
    if (read != 1 || strcmp(name, function) || rename(path, held))
        return SUCCESS;
    for (int i = 0; i < 12000; i++) {
        if (access(held, F_OK))
            return SUCCESS;
        usleep(10000);
    }
    return UNKNOWN;
}

/* What every call begins with: the error an operator of this stub asked for. */
static CUresult enter(const char *function) {
    count(function);
    if (folder[0]) {
        CUresult waited = hold(function);
        if (waited)
            return waited;
        char path[600], name[128];
        int code = 0, skip = 0, of_workers = 0;
        snprintf(path, sizeof path, "%s/fail", folder);
        FILE *file = fopen(path, "r+");
        if (file) {
            int read = fscanf(file, "%127s %d %d %d", name, &code, &skip, &of_workers);
            if (read == 4 && !strcmp(name, function) && (getenv("CUDA_STUB_UNIFIED") || !of_workers)) {
                if (skip > 0) {
                    rewind(file);
                    if (ftruncate(fileno(file), 0) == 0)
                        fprintf(file, "%s %d %d %d", name, code, skip - 1, of_workers);
                } else {
                    unlink(path);
                    fclose(file);
                    for (int i = 0; i < visible_count && is_sticky(code); i++)
                        if (!current || current == &contexts[i])
                            contexts[i].lost = code;
                    return code;
                }
            }
            fclose(file);
        }
    }
    return SUCCESS;
}

#define ENTER                                                                                                          \
    do {                                                                                                               \
        CUresult entered = enter(__func__);                                                                            \
        if (entered)                                                                                                   \
            return entered;                                                                                            \
        if (!initialized)                                                                                              \
            return NOT_INITIALIZED;                                                                                    \
    } while (0)
#define ENTER_CONTEXT                                                                                                  \
    do {                                                                                                               \
        ENTER;                                                                                                         \
        if (!current)                                                                                                  \
            return INVALID_CONTEXT;                                                                                    \
        if (lost())                                                                                                    \
            return current->lost;                                                                                      \
    } while (0)

API CUresult cuGetErrorName(CUresult code, const char **text) {
    static __thread char buffer[48];
    switch (code) {
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case NO_DEVICE: *text = "CUDA_ERROR_NO_DEVICE"; break;
    case ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    default: snprintf(buffer, sizeof buffer, "CUDA_ERROR_%d", code); *text = buffer;
    }
    return SUCCESS;
}
API CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

/* --------------------------------------------------------------------------------------- devices and contexts */

/* Where a visible device is. */
#define BUS(device) (0x18 + visible[device])

static void name_device(int device, char *text, size_t size) {
    snprintf(text, size, "GPU-00000000-0000-0000-0000-%012x", (unsigned)device);
}

/* The device that an entry of $CUDA_VISIBLE_DEVICES names; -1: none, or more than one. */
static int device_named(const char *entry, size_t length, int count) {
    char text[64], name[64], *end;
    int found = -1;
    if (length >= sizeof text)
        return -1;
    memcpy(text, entry, length);
    text[length] = 0;
    long index = strtol(text, &end, 10);
    if (length && !*end)
        return index >= 0 && index < count ? (int)index : -1;
    for (int i = 0; i < count && length > 4; i++) {
        name_device(i, name, sizeof name);
        if (!strncmp(name, text, length)) {
            if (found >= 0)
                return -1;
            found = i;
        }
    }
    return found;
}

/* What this process does with host memory, for others to read. */
static void open_host_page(void) {
    char path[600];
    snprintf(path, sizeof path, "%s/host-%d", folder, getpid());
    int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    if (!ftruncate(fd, PAGE)) {
        host_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (page != MAP_FAILED)
            host = page;
    }
    close(fd);
}

API CUresult cuInit(unsigned flags) {
    (void)flags;
    const char *directory = getenv("CUDA_STUB_DIR");
    if (directory && !folder[0])
        snprintf(folder, sizeof folder, "%s", directory);
    CUresult entered = enter(__func__);
    if (entered)
        return entered;
    const char *devices = getenv("CUDA_STUB_DEVICES"), *pause = getenv("CUDA_STUB_DELAY_US");
    const char *limit = getenv("CUDA_STUB_LOCKABLE"), *found = getenv("CUDA_STUB_FREED");
    if (initialized)
        return SUCCESS;
    if (!directory)
        return NO_DEVICE;
    pthread_mutex_lock(&lock);
    if (!initialized) {
        int count = devices ? atoi(devices) : 1;
        const char *names = getenv("CUDA_VISIBLE_DEVICES");
        hidden = getenv("CUDA_STUB_HIDDEN") != NULL;
        unified = getenv("CUDA_STUB_UNIFIED") != NULL;
        read_only = getenv("CUDA_STUB_READ_ONLY") != NULL;
        peers = getenv("CUDA_STUB_PEERS") != NULL;
        delay_us = pause ? atoi(pause) : 0;
        lockable = limit ? strtoull(limit, NULL, 10) : UINT64_MAX;
        freed = !found || !strcmp(found, "refused") ? REFUSED : !strcmp(found, "fault") ? FAULT : THERE;
        int missing = gone();
        if (!names) {
            for (int device = 0; device < count && visible_count < MAX_DEVICES; device++)
                if (device != missing)
                    visible[visible_count++] = device;
        } else {
            while (*names && visible_count < MAX_DEVICES) {
                size_t length = strcspn(names, ",");
                int device = device_named(names, length, count);
                if (device < 0 || device == missing)
                    break; /* as the driver does: what follows an unknown name is not visible */
                visible[visible_count++] = device;
                names += length + (names[length] == ',');
            }
        }
        for (int i = 0; i < visible_count; i++)
            contexts[i].device = visible[i];
        initialized = visible_count > 0;
        if (initialized)
            open_host_page();
    }
    pthread_mutex_unlock(&lock);
    return initialized ? SUCCESS : NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) {
    const char *given = getenv("CUDA_STUB_VERSION");
    *version = given ? atoi(given) : VERSION;
    return SUCCESS;
}
API CUresult cuDeviceGetCount(int *count) { ENTER; *count = visible_count; return SUCCESS; }
API CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER;
    if (ordinal < 0 || ordinal >= visible_count)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
API CUresult cuDeviceGetName(char *name, int size, int device) { (void)device; snprintf(name, size, "stub of a CUDA device"); return SUCCESS; }
API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, int device) {
    ENTER;
    if (device < 0 || device >= visible_count)
        return INVALID_DEVICE;
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)visible[device];
    return SUCCESS;
}
API CUresult cuDeviceGetUuid(CUuuid *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
API CUresult cuDeviceTotalMem_v2(size_t *size, int device) { ENTER; (void)device; *size = 1ull << 34; return SUCCESS; }
API CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER;
    if (device < 0 || device >= visible_count)
        return INVALID_DEVICE;
    switch (attribute) {
    case 16: *value = 132; break;              /* multiprocessors */
    case 33: *value = BUS(device); break;      /* PCI bus */
    case 40: *value = 3; break;                /* copy engines */
    case 41: *value = 1; break;                /* unified addressing */
    case 75: *value = 9; break;                /* compute capability, major */
    case 91: *value = 1; break;                /* registered memory has one address */
    case 99: *value = 1; break;                /* host memory can be registered */
    case 113: *value = read_only; break;       /* ... that is only read */
    case 115: *value = 1; break;               /* memory pools */
    default: *value = 0;
    }
    return SUCCESS;
}
API CUresult cuDeviceGetPCIBusId(char *text, int size, int device) {
    ENTER;
    if (device < 0 || device >= visible_count)
        return INVALID_DEVICE;
    snprintf(text, (size_t)size, "0000:%02X:00.0", BUS(device));
    return SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER;
    if (device < 0 || device >= visible_count)
        return INVALID_DEVICE;
    contexts[device].retained++;
    *context = &contexts[device];
    return SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(int device) { ENTER; contexts[device].retained--; return SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER;
    *flags = 0;
    *active = device >= 0 && device < visible_count && contexts[device].retained > 0;
    return SUCCESS;
}
API CUresult cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { ENTER; (void)device; (void)flags; return SUCCESS; }
API CUresult cuCtxSetCurrent(void *context) { ENTER; current = context; return SUCCESS; }
API CUresult cuCtxGetCurrent(void **context) { ENTER; *context = current; return SUCCESS; }
API CUresult cuCtxPushCurrent_v2(void *context) { ENTER; current = context; return SUCCESS; }
API CUresult cuCtxPopCurrent_v2(void **context) { ENTER; if (context) *context = current; current = NULL; return SUCCESS; }
API CUresult cuCtxGetDevice(int *device) { ENTER_CONTEXT; *device = (int)(current - contexts); return SUCCESS; }
API CUresult cuCtxGetApiVersion(void *context, unsigned *version) { (void)context; *version = VERSION; return SUCCESS; }
API CUresult cuCtxGetFlags(unsigned *flags) { ENTER_CONTEXT; *flags = 0; return SUCCESS; }

/* ----------------------------------------------------------------------------------------------------- memory */

/* Call with the lock held. */
static allocation_t *find(CUdeviceptr pointer) {
    for (allocation_t *a = allocations; a; a = a->next)
        if (pointer >= (CUdeviceptr)a->base && pointer < (CUdeviceptr)a->base + a->byte_size)
            return a;
    return NULL;
}

/* Where in its first block an allocation begins: small ones share blocks with others, so not at the block's beginning. */
static uint64_t start_of(uint32_t id, uint64_t byte_size) {
    return byte_size < GRANULE / 2 ? 512ull * (1 + id % 16) : 0;
}

static CUresult map(int32_t owner, uint32_t id, uint64_t byte_size, int device, int create, allocation_t **made) {
    char path[600];
    snprintf(path, sizeof path, "%s/%d-%u", folder, owner, id);
    int fd = open(path, (create ? O_CREAT | O_EXCL : 0) | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return create ? OUT_OF_MEMORY : INVALID_VALUE;
    uint64_t at = start_of(id, byte_size), mapped = (at + byte_size + GRANULE - 1) / GRANULE * GRANULE;
    if (create && ftruncate(fd, PAGE + mapped)) {
        close(fd);
        unlink(path);
        return OUT_OF_MEMORY;
    }
    control_t *control = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED) {
        close(fd);
        return OUT_OF_MEMORY;
    }
    if (create) {
        *control = (control_t){byte_size, device, 0};
    } else if (control->freed || (control->device != device && !peers)) {
        CUresult result = control->freed ? INVALID_VALUE : PEER_ACCESS_UNSUPPORTED;
        munmap(control, PAGE);
        close(fd);
        return result;
    } else {
        byte_size = control->byte_size;
        at = start_of(id, byte_size);
        mapped = (at + byte_size + GRANULE - 1) / GRANULE * GRANULE;
    }
    char *room = mmap(NULL, mapped + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *block = (char *)(((uintptr_t)room + GRANULE - 1) / GRANULE * GRANULE);
    munmap(room, (size_t)(block - room));
    munmap(block + mapped, (size_t)(room + GRANULE - block));
    if (mmap(block, mapped, hidden ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, PAGE) == MAP_FAILED) {
        munmap(control, PAGE);
        close(fd);
        return OUT_OF_MEMORY;
    }
    allocation_t *a = calloc(1, sizeof *a);
    *a = (allocation_t){block + at, block, byte_size, mapped, control, fd, !create, 1, device, owner, id, allocations};
    allocations = a;
    *made = a;
    return SUCCESS;
}

static void drop(allocation_t *a) {
    allocation_t **at = &allocations;
    while (*at && *at != a)
        at = &(*at)->next;
    if (*at)
        *at = a->next;
    if (!a->imported) {
        char path[600];
        a->control->freed = 1;
        snprintf(path, sizeof path, "%s/%d-%u", folder, a->owner, a->id);
        unlink(path);
    }
    munmap(a->block, a->mapped);
    munmap(a->control, PAGE);
    close(a->fd);
    free(a);
}

/* What a process leaves allocated is freed with it, unless it is killed. */
static void __attribute__((destructor)) leave(void) {
    while (allocations)
        drop(allocations);
    if (host != &nowhere) {
        char path[600];
        snprintf(path, sizeof path, "%s/host-%d", folder, getpid());
        unlink(path);
    }
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t byte_size) {
    ENTER_CONTEXT;
    if (!byte_size)
        return INVALID_VALUE;
    allocation_t *a;
    pthread_mutex_lock(&lock);
    CUresult result = map(getpid(), ++next_id, byte_size, current->device, 1, &a);
    if (!result)
        *pointer = (CUdeviceptr)a->base;
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER_CONTEXT;
    pthread_mutex_lock(&lock);
    allocation_t *a = find(pointer);
    CUresult result = a && !a->imported && (CUdeviceptr)a->base == pointer ? SUCCESS : INVALID_VALUE;
    if (!result)
        drop(a);
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *byte_size, CUdeviceptr pointer) {
    ENTER_CONTEXT;
    pthread_mutex_lock(&lock);
    allocation_t *a = find(pointer);
    if (a && base)
        *base = (CUdeviceptr)a->base;
    if (a && byte_size)
        *byte_size = a->byte_size;
    pthread_mutex_unlock(&lock);
    return a ? SUCCESS : NOT_FOUND;
}

API CUresult cuMemGetInfo_v2(size_t *free_size, size_t *total) { ENTER_CONTEXT; *free_size = *total = 1ull << 34; return SUCCESS; }

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr pointer) {
    ENTER_CONTEXT;
    pthread_mutex_lock(&lock);
    allocation_t *a = find(pointer);
    pthread_mutex_unlock(&lock);
    if (!a)
        return INVALID_VALUE;
    if (attribute == 2) /* memory type */
        *(unsigned *)value = 2;
    else if (attribute == 9) /* device ordinal */
        *(int *)value = a->device;
    else
        return INVALID_VALUE;
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------------------- copies */

/* Whether its owner has freed it, or is gone. */
static int is_freed(allocation_t *a) {
    return a->control->freed || (a->imported && kill(a->owner, 0) && errno == ESRCH);
}

static int usable(allocation_t *a, CUdeviceptr pointer, uint64_t count) {
    return pointer + count <= (CUdeviceptr)a->base + a->byte_size && !(freed == REFUSED && is_freed(a));
}

static CUresult check(CUdeviceptr to, CUdeviceptr from, uint64_t count) {
    pthread_mutex_lock(&lock);
    allocation_t *target = find(to), *source = find(from);
    int good = (!target || usable(target, to, count)) && (!source || usable(source, from, count));
    pthread_mutex_unlock(&lock);
    return good ? SUCCESS : INVALID_VALUE;
}

/* For calls that say which side is the device's. */
static CUresult device_side(CUdeviceptr pointer, uint64_t count) {
    pthread_mutex_lock(&lock);
    allocation_t *a = find(pointer);
    pthread_mutex_unlock(&lock);
    return a || unified || !count ? SUCCESS : INVALID_VALUE;
}

/* Call with the lock held. */
static int is_pinned(CUdeviceptr address) {
    for (pinned_t *p = pinned; p; p = p->next)
        if (address >= (CUdeviceptr)p->start && address < (CUdeviceptr)p->start + p->byte_size)
            return 1;
    return 0;
}

/* Page-locked memory stays the device's, whatever becomes of its object: what is gone of it here is passed over. Other memory whose
 * pages are missing is a fault. */
static int move(allocation_t *a, CUdeviceptr device, char *host, uint64_t count, int to_device) {
    off_t at = (off_t)(PAGE + device - (CUdeviceptr)a->block);
    while (count) {
        ssize_t moved = to_device ? pwrite(a->fd, host, count, at) : pread(a->fd, host, count, at);
        if (moved <= 0)
            return moved < 0 && errno == EFAULT && is_pinned((CUdeviceptr)host);
        host += moved, at += moved, count -= (uint64_t)moved;
    }
    return 1;
}

/* Call with the lock held, so that nothing is freed under a copy. */
static void copy(context_t *context, CUdeviceptr to, CUdeviceptr from, uint64_t count) {
    allocation_t *target = find(to), *source = find(from);
    int good = 1;
    if (freed == FAULT && ((target && is_freed(target)) || (source && is_freed(source)))) {
        good = 0;
    } else if (target && source) {
        char *between = malloc(count);
        good = move(source, from, between, count, 0) && move(target, to, between, count, 1);
        free(between);
    } else if (target) {
        good = move(target, to, (char *)from, count, 1);
    } else if (source) {
        good = move(source, from, (char *)to, count, 0);
    } else {
        memcpy((void *)to, (void *)from, count);
    }
    if (!good)
        context->lost = ILLEGAL_ADDRESS;
}

static CUresult copy_now(CUdeviceptr to, CUdeviceptr from, uint64_t count) {
    CUresult result = check(to, from, count);
    if (!result) {
        pthread_mutex_lock(&lock);
        copy(current, to, from, count);
        pthread_mutex_unlock(&lock);
    }
    return result ? result : current->lost;
}

/* ------------------------------------------------------------------------------------------- streams and events */

static void *run(void *argument) {
    stream_t *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        task_t *task = stream->first;
        if (!task) {
            if (stream->closing)
                break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (task->kind == WAIT && task->event->reached < task->ticket) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        stream->first = task->next;
        stream->busy = 1;
        if (delay_us && (task->kind == COPY || task->kind == FILL)) {
            static uint64_t copying;
            if (!stream->of_xla && ++copying > host->at_once)
                host->at_once = copying;
            pthread_mutex_unlock(&lock);
            usleep((useconds_t)delay_us);
            pthread_mutex_lock(&lock);
            copying -= !stream->of_xla;
        }
        if (stream->context->lost) {
            /* nothing happens any more, and whoever waits is told */
            if (task->kind == RECORD)
                task->event->reached = task->ticket;
        } else if (task->kind == COPY) {
            copy(stream->context, task->to, task->from, task->count);
        } else if (task->kind == FILL) {
            allocation_t *target = find(task->to);
            char *filling = malloc(task->count);
            memset(filling, task->value, task->count);
            if (!target || !move(target, task->to, filling, task->count, 1))
                stream->context->lost = ILLEGAL_ADDRESS;
            free(filling);
        } else if (task->kind == RECORD && task->event->reached < task->ticket) {
            task->event->reached = task->ticket;
        }
        free(task);
        stream->busy = 0;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static CUresult put(stream_t *stream, task_t task) {
    task_t *made = malloc(sizeof *made);
    *made = task;
    if ((task.kind == COPY || task.kind == FILL) && !stream->of_xla)
        __atomic_fetch_add(&host->queued, 1, __ATOMIC_RELAXED);
    made->next = NULL;
    pthread_mutex_lock(&lock);
    if (stream->first)
        stream->last->next = made;
    else
        stream->first = made;
    stream->last = made;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API CUresult cuStreamCreate(stream_t **stream, unsigned flags) {
    ENTER_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->context = current;
    (*stream)->of_xla = !flags; /* the plugin's: what it copies is nothing that a worker has asked for */
    if (pthread_create(&(*stream)->thread, NULL, run, *stream)) {
        free(*stream);
        return OUT_OF_MEMORY;
    }
    return SUCCESS;
}
API CUresult cuStreamCreateWithPriority(stream_t **stream, unsigned flags, int priority) { (void)priority; return cuStreamCreate(stream, flags); }
API CUresult cuStreamDestroy_v2(stream_t *stream) {
    ENTER;
    if (stream->context->lost)
        return stream->context->lost;
    pthread_mutex_lock(&lock);
    stream->closing = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return SUCCESS;
}
API CUresult cuStreamSynchronize(stream_t *stream) {
    ENTER_CONTEXT;
    __atomic_fetch_add(&host->waited, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&lock);
    while (stream && (stream->first || stream->busy))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return lost();
}
API CUresult cuStreamQuery(stream_t *stream) {
    ENTER_CONTEXT;
    return stream && (stream->first || stream->busy) ? NOT_READY : SUCCESS;
}
API CUresult cuCtxSynchronize(void) { ENTER_CONTEXT; return SUCCESS; }
API CUresult cuEventCreate(event_t **event, unsigned flags) { ENTER_CONTEXT; (void)flags; *event = calloc(1, sizeof **event); return SUCCESS; }
API CUresult cuEventDestroy_v2(event_t *event) { ENTER; free(event); return SUCCESS; }
API CUresult cuEventRecord(event_t *event, stream_t *stream) {
    ENTER_CONTEXT;
    event->recorded++;
    if (!stream) {
        event->reached = event->recorded;
        return SUCCESS;
    }
    return put(stream, (task_t){.kind = RECORD, .event = event, .ticket = event->recorded});
}
API CUresult cuStreamWaitEvent(stream_t *stream, event_t *event, unsigned flags) {
    ENTER_CONTEXT;
    (void)flags;
    return put(stream, (task_t){.kind = WAIT, .event = event, .ticket = event->recorded});
}
API CUresult cuEventSynchronize(event_t *event) {
    ENTER_CONTEXT;
    pthread_mutex_lock(&lock);
    while (event->reached < event->recorded)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return lost();
}
API CUresult cuEventQuery(event_t *event) { ENTER_CONTEXT; return event->reached < event->recorded ? NOT_READY : SUCCESS; }

/* Whether this context knows the host memory as page-locked; -1: it begins in such memory and ends elsewhere, or the reverse. */
static int is_locked(CUdeviceptr address, uint64_t count) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (pinned_t *p = pinned; p && !found; p = p->next) {
        CUdeviceptr start = (CUdeviceptr)p->start, end = start + p->byte_size;
        if ((!p->only || p->only == current) && address < end && address + count > start)
            found = address >= start && address + count <= end ? 1 : -1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static CUresult copy_later(CUdeviceptr to, CUdeviceptr from, uint64_t count, stream_t *stream) {
    if (!stream || !count)
        return count ? copy_now(to, from, count) : SUCCESS;
    if (is_locked(to, count) < 0 || is_locked(from, count) < 0)
        return INVALID_VALUE;
    CUresult result = check(to, from, count);
    return result ? result : put(stream, (task_t){.kind = COPY, .to = to, .from = from, .count = count});
}

/* Notes whether the host's side of a copy is page-locked, when it is asked for. */
static CUresult note_host(CUresult result, CUdeviceptr address, uint64_t count) {
    if (result)
        return result;
    int locked = is_locked(address, count);
    pthread_mutex_lock(&lock);
    *(locked ? &host->locked_copied : &host->other_copied) += count;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { ENTER_CONTEXT; return copy_now(to, from, n); }
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, stream_t *s) { ENTER_CONTEXT; return copy_later(to, from, n, s); }
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) { ENTER_CONTEXT; return device_side(to, n) ? INVALID_VALUE : copy_now(to, (CUdeviceptr)from, n); }
API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) { ENTER_CONTEXT; return device_side(from, n) ? INVALID_VALUE : copy_now((CUdeviceptr)to, from, n); }
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) { ENTER_CONTEXT; return device_side(to, n) || device_side(from, n) ? INVALID_VALUE : copy_now(to, from, n); }
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, stream_t *s) {
    ENTER_CONTEXT;
    return note_host(device_side(to, n) ? INVALID_VALUE : copy_later(to, (CUdeviceptr)from, n, s), (CUdeviceptr)from, n);
}
API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, stream_t *s) {
    ENTER_CONTEXT;
    return note_host(device_side(from, n) ? INVALID_VALUE : copy_later((CUdeviceptr)to, from, n, s), (CUdeviceptr)to, n);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, stream_t *s) { ENTER_CONTEXT; return device_side(to, n) || device_side(from, n) ? INVALID_VALUE : copy_later(to, from, n, s); }
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, stream_t *s) {
    ENTER_CONTEXT;
    CUresult result = !s ? INVALID_VALUE : check(to, to, n);
    return result || !n ? result : put(s, (task_t){.kind = FILL, .to = to, .count = n, .value = value});
}

/* ------------------------------------------------------------------------------------------ handles of other processes */

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER_CONTEXT;
    pthread_mutex_lock(&lock);
    allocation_t *a = find(pointer);
    if (a && !a->imported) {
        handle_t named = {"CUDASTUB", a->owner, a->id};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &named, sizeof named);
    }
    pthread_mutex_unlock(&lock);
    return a && !a->imported ? SUCCESS : INVALID_VALUE;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    ENTER_CONTEXT;
    handle_t named;
    memcpy(&named, &handle, sizeof named);
    if (memcmp(named.magic, "CUDASTUB", 8) || flags != 1)
        return INVALID_VALUE;
    if (named.owner == getpid())
        return INVALID_CONTEXT;
    CUresult result = SUCCESS;
    pthread_mutex_lock(&lock);
    allocation_t *a = allocations;
    while (a && !(a->imported && a->owner == named.owner && a->id == named.id))
        a = a->next;
    if (a)
        a->openings++;
    else if (kill(named.owner, 0) && errno == ESRCH)
        result = INVALID_VALUE;
    else
        result = map(named.owner, named.id, 0, current->device, 0, &a);
    if (!result)
        *pointer = (CUdeviceptr)a->base;
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER_CONTEXT;
    pthread_mutex_lock(&lock);
    allocation_t *a = find(pointer);
    CUresult result = a && a->imported && (CUdeviceptr)a->base == pointer ? SUCCESS : INVALID_VALUE;
    if (!result && --a->openings == 0)
        drop(a);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ------------------------------------------------------------------------------------------------ page-locked memory */

/* Whether all of it is mapped, and may be written to if that is asked for. */
static int is_mapped(char *start, size_t byte_size, int writable) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[1024], mode[8];
    uint64_t from, to, at = (uint64_t)start;
    while (maps && at < (uint64_t)start + byte_size && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &from, &to, mode) == 3 && from <= at && at < to && (!writable || mode[1] == 'w'))
            at = to;
    if (maps)
        fclose(maps);
    return at >= (uint64_t)start + byte_size;
}

API CUresult cuMemHostRegister_v2(void *start, size_t byte_size, unsigned flags) {
    int mapped_before = is_mapped(start, byte_size, 0);
    ENTER_CONTEXT;
    if (mapped_before && !is_mapped(start, byte_size, 0))
        host->violations++; /* unmapped while it was being registered */
    if (flags & ~(unsigned)(REGISTER_PORTABLE | REGISTER_DEVICE_MAP | REGISTER_READ_ONLY))
        return INVALID_VALUE;
    if (flags & REGISTER_READ_ONLY && !read_only)
        return NOT_SUPPORTED;
    if (!start || !byte_size || !is_mapped(start, byte_size, !(flags & REGISTER_READ_ONLY)))
        return INVALID_VALUE;
    CUresult result = SUCCESS;
    pthread_mutex_lock(&lock);
    for (pinned_t *p = pinned; p; p = p->next)
        if ((char *)start < p->start + p->byte_size && p->start < (char *)start + byte_size)
            result = HOST_ALREADY_REGISTERED;
    if (!result && byte_size > lockable - host->locked)
        result = OUT_OF_MEMORY;
    if (!result) {
        pinned_t *p = malloc(sizeof *p);
        *p = (pinned_t){start, byte_size, flags & REGISTER_PORTABLE ? NULL : current, pinned};
        pinned = p;
        host->locked += byte_size;
        host->registered++;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuMemHostUnregister(void *start) {
    ENTER_CONTEXT;
    CUresult result = HOST_NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (pinned_t **at = &pinned; *at; at = &(*at)->next) {
        if ((*at)->start == start) {
            pinned_t *gone = *at;
            *at = gone->next;
            host->locked -= gone->byte_size;
            if (!is_mapped(gone->start, gone->byte_size, 0))
                host->violations++;
            free(gone);
            result = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---------------------------------------------------------------------------------------------------- how it is found */

API CUresult cuGetExportTable(const void **table, const CUuuid *id) { (void)id; *table = NULL; return NOT_FOUND; }

/* "cuMemAlloc" of a recent version is cuMemAlloc_v2, and so on. */
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version;
    (void)flags;
    char versioned[160];
    static void *self;
    if (!self) {
        Dl_info found;
        dladdr((void *)cuInit, &found);
        self = dlopen(found.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(self, versioned);
    if (!*function)
        *function = dlsym(self, name);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
