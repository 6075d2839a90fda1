/* A guard against SIGBUS in memory that belongs to somebody else.
 *
 * A client's region can lose its pages at any time: its owner truncates the object, or the file system is full when a hole is
 * touched. The next access raises SIGBUS in whatever thread made it, numpy's or XLA's. Inside a registered range this handler maps
 * zeros from the faulting page to the end of the range, counts, and lets the access continue; whoever uses the range asks for the count
 * afterwards and throws the result away. A fault anywhere else is passed to the handler before us, or kills the process as it should.
 *
 *     slot      | start | end | faults | held |      start 0: the slot is free
 *
 * Held are ranges whose pages a device's driver has locked: the device goes on seeing these pages, whatever becomes of the object.
 *
 * The handler may run in any thread at any instruction: it takes no lock, allocates nothing, and reads only the table. The table is
 * written by one thread (Python's, which holds the GIL); `start` is published last and withdrawn first.
 */

#include "_python.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLOTS 8192

typedef struct {
    _Atomic uintptr_t start;
    _Atomic uintptr_t end;
    _Atomic unsigned long faults;
    _Atomic int held;
} slot_t;

static slot_t slots[SLOTS];
/* One more than the highest slot ever used, so that the handler does not walk the whole table. */
static _Atomic int used;
/* The faults of all slots that are taken: as long as it is 0 nobody has to look at any of them. */
static _Atomic unsigned long all_faults;
static uintptr_t page_size;
static struct sigaction previous;
static int installed;

static int cover(uintptr_t address) {
    int top = atomic_load(&used);
    for (int i = 0; i < top; i++) {
        uintptr_t start = atomic_load(&slots[i].start);
        uintptr_t end = atomic_load(&slots[i].end);
        if (start == 0 || address < start || address >= end)
            continue;
        uintptr_t page = address & ~(page_size - 1);
        uintptr_t last = (end + page_size - 1) & ~(page_size - 1);
        void *zeros = mmap((void *)page, last - page, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (zeros == MAP_FAILED)
            return 0;
        atomic_fetch_add(&slots[i].faults, 1);
        atomic_fetch_add(&all_faults, 1);
        return 1;
    }
    return 0;
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    int saved = errno;
    /* A positive code comes from the kernel; kill(2) has none and no address. */
    if (info->si_code > 0 && cover((uintptr_t)info->si_addr)) {
        errno = saved;
        return;
    }
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(number);
    } else {
        /* The access is repeated on return and is fatal then; a signal that was sent has to be sent again. */
        signal(number, SIG_DFL);
        if (info->si_code <= 0)
            raise(number);
    }
    errno = saved;
}

static PyObject *guard_install(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    if (!installed) {
        struct sigaction action = {0};
        action.sa_sigaction = on_sigbus;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        if (sigaction(SIGBUS, &action, &previous) != 0)
            return PyErr_SetFromErrno(PyExc_OSError);
        installed = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *guard_add(PyObject *module, PyObject *object) {
    (void)module;
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) != 0)
        return NULL;
    uintptr_t start = (uintptr_t)buffer.buf;
    uintptr_t end = start + (uintptr_t)buffer.len;
    PyBuffer_Release(&buffer);
    if (!installed || start % page_size != 0 || end <= start) {
        PyErr_SetString(PyExc_ValueError, "the guard is not installed, or the range is empty or does not start on a page");
        return NULL;
    }
    for (int i = 0; i < SLOTS; i++) {
        if (atomic_load(&slots[i].start) != 0)
            continue;
        atomic_store(&slots[i].end, end);
        atomic_store(&slots[i].held, 0);
        atomic_store(&slots[i].start, start);
        if (i >= atomic_load(&used))
            atomic_store(&used, i + 1);
        return PyLong_FromLong(i);
    }
    PyErr_Format(PyExc_OverflowError, "all %d slots of the guard are taken", SLOTS);
    return NULL;
}

static long slot_of(PyObject *object) {
    long slot = PyLong_AsLong(object);
    if (slot == -1 && PyErr_Occurred())
        return -1;
    if (slot < 0 || slot >= SLOTS || atomic_load(&slots[slot].start) == 0) {
        PyErr_Format(PyExc_LookupError, "slot %ld of the guard is free", slot);
        return -1;
    }
    return slot;
}

static PyObject *guard_remove(PyObject *module, PyObject *object) {
    (void)module;
    long slot = slot_of(object);
    if (slot < 0)
        return NULL;
    atomic_store(&slots[slot].start, 0);
    atomic_fetch_sub(&all_faults, atomic_exchange(&slots[slot].faults, 0));
    Py_RETURN_NONE;
}

static PyObject *guard_faults(PyObject *module, PyObject *object) {
    (void)module;
    long slot = slot_of(object);
    if (slot < 0)
        return NULL;
    return PyLong_FromUnsignedLong(atomic_load(&slots[slot].faults));
}

static PyObject *guard_any(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyBool_FromLong(atomic_load(&all_faults) != 0);
}

static PyObject *guard_hold(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *number;
    int held;
    if (!PyArg_ParseTuple(arguments, "Op", &number, &held))
        return NULL;
    long slot = slot_of(number);
    if (slot < 0)
        return NULL;
    atomic_store(&slots[slot].held, held);
    Py_RETURN_NONE;
}

static PyObject *guard_may_be_missing(PyObject *module, PyObject *object) {
    (void)module;
    uintptr_t address = (uintptr_t)PyLong_AsVoidPtr(object);
    if (PyErr_Occurred())
        return NULL;
    int top = atomic_load(&used);
    for (int i = 0; i < top; i++) {
        uintptr_t start = atomic_load(&slots[i].start);
        if (start != 0 && start <= address && address < atomic_load(&slots[i].end))
            return PyBool_FromLong(!atomic_load(&slots[i].held));
    }
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"install", guard_install, METH_NOARGS, "Installs the SIGBUS handler. Idempotent."},
    {"add", guard_add, METH_O, "Guards the memory of a buffer, which must start on a page; returns its slot."},
    {"remove", guard_remove, METH_O, "Frees a slot. Nobody may touch the memory any more."},
    {"faults", guard_faults, METH_O, "How often the guarded memory was missing."},
    {"hold", guard_hold, METH_VARARGS, "hold(slot, held): whether a driver has locked the pages of that slot."},
    {"may_be_missing", guard_may_be_missing, METH_O, "Whether an address is in a guarded range that is not held."},
    {"any", guard_any, METH_NOARGS, "Whether any memory that is guarded now was missing."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.shm._guard", "Turns SIGBUS in registered ranges into a count.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__guard(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringMacro(module, SOURCES))
        Py_CLEAR(module);
    return module;
}
