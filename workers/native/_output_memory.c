/* Where a program's output lies on a CPU: in memory of ours, if XLA is offered some before it runs.
 *
 *     offer(byte_size, skip, address) ─▶ the program runs; of its allocations of that size the one after so many gets that address
 *                                     ─▶ the output lies there ─▶ whoever frees it gives nothing back to the C library
 *
 * XLA cannot be told where an output goes: it asks the C library for memory. So the calls of its own libraries to posix_memalign
 * and free come here, by their entries in those libraries' tables of imported functions; nobody else's calls do. Without an offer
 * they go on to where they went before.
 *
 * Offers are the calling thread's, until it withdraws them. An address that was taken is known until it is freed, in whatever
 * thread that happens. There is room for TAKEN of them; without room an allocation is an ordinary one, as it is wherever an offer does
 * not fit. So nobody may rely on an offer: where the output lies is seen by its address.
 */

#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TAKEN 64
#define OFFERS 16
#define WATCHED 64

typedef struct {
    size_t byte_size;
    /* Allocations of that size that come before. */
    size_t skip;
    void *address;
} offer_t;

typedef struct {
    size_t byte_size;
    void *address;
} allocation_t;

typedef struct {
    bool watching;
    size_t offer_count, watched_count;
    offer_t offers[OFFERS];
    allocation_t watched[WATCHED];
} thread_t;

static __thread thread_t thread;
/* Addresses that were taken and are not free; one that was taken twice stands there twice. */
static _Atomic(void *) taken[TAKEN];
static atomic_size_t taken_count;

/* Replaces one entry. false: there is no such entry. */
static bool exchange(void *from, void *to) {
    for (size_t i = 0; i < TAKEN; i++) {
        void *expected = from;
        if (atomic_load_explicit(&taken[i], memory_order_relaxed) == from &&
            atomic_compare_exchange_strong(&taken[i], &expected, to))
            return true;
    }
    return false;
}

/* The address for this allocation, which is one less that the others of its size have to wait for. NULL: none is offered. */
static void *offered(thread_t *here, size_t alignment, size_t byte_size) {
    void *address = NULL;
    for (size_t i = 0; i < here->offer_count; i++) {
        offer_t *one = &here->offers[i];
        if (one->byte_size != byte_size)
            continue;
        if (one->skip-- == 0 && (uintptr_t)one->address % alignment == 0)
            address = one->address;
    }
    return address;
}

static int allocate(void **memory, size_t alignment, size_t byte_size) {
    thread_t *here = &thread;
    void *address = here->offer_count == 0 ? NULL : offered(here, alignment, byte_size);
    if (address != NULL && exchange(NULL, address)) {
        atomic_fetch_add(&taken_count, 1);
        *memory = address;
        return 0;
    }
    int failure = posix_memalign(memory, alignment, byte_size);
    if (here->watching && failure == 0 && here->watched_count < WATCHED)
        here->watched[here->watched_count++] = (allocation_t){byte_size, *memory};
    return failure;
}

static void release(void *memory) {
    if (memory != NULL && atomic_load(&taken_count) != 0 && exchange(memory, NULL))
        atomic_fetch_sub(&taken_count, 1);
    else
        free(memory);
}

/* ------------------------------------------------------------------------------- the tables of imported functions */

typedef struct {
    const char *folder;
    unsigned allocating, freeing, failed;
} search_t;

typedef struct {
    uintptr_t base;
    const ElfW(Sym) *symbols;
    const char *names;
    /* What the loader has made read-only once everything was resolved. */
    uintptr_t sealed, sealed_end;
} library_t;

/* false: the entry cannot be written. */
static bool replace(const library_t *library, void **entry, void *function) {
    uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)entry & ~(page_size - 1);
    bool sealed = (uintptr_t)entry >= library->sealed && (uintptr_t)entry < library->sealed_end;
    if (sealed && mprotect((void *)page, page_size, PROT_READ | PROT_WRITE) != 0)
        return false;
    __atomic_store_n(entry, function, __ATOMIC_RELEASE);
    return !sealed || mprotect((void *)page, page_size, PROT_READ) == 0;
}

static void lead_here(search_t *search, const library_t *library, const ElfW(Rela) *relocation, size_t byte_size) {
    for (const ElfW(Rela) *end = relocation + byte_size / sizeof *relocation; relocation < end; relocation++) {
        size_t symbol = sizeof(void *) == 8 ? ELF64_R_SYM(relocation->r_info) : ELF32_R_SYM(relocation->r_info);
        /* An entry for a function holds its address and nothing else. */
        if (symbol == 0 || relocation->r_addend != 0)
            continue;
        const char *name = library->names + library->symbols[symbol].st_name;
        void **entry = (void **)(library->base + relocation->r_offset);
        bool allocates = strcmp(name, "posix_memalign") == 0;
        if (!allocates && strcmp(name, "free") != 0)
            continue;
        if (!replace(library, entry, allocates ? (void *)allocate : (void *)release))
            search->failed++;
        else if (allocates)
            search->allocating++;
        else
            search->freeing++;
    }
}

static int look(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    search_t *search = data;
    if (strncmp(info->dlpi_name, search->folder, strlen(search->folder)) != 0)
        return 0;
    library_t library = {.base = info->dlpi_addr};
    const ElfW(Dyn) *entry = NULL;
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_DYNAMIC)
            entry = (const void *)(library.base + part->p_vaddr);
        if (part->p_type == PT_GNU_RELRO) {
            /* As glibc does: a page that is only partly of it stays writable. */
            uintptr_t pages = ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1), start = library.base + part->p_vaddr;
            library.sealed = start & pages;
            library.sealed_end = (start + part->p_memsz) & pages;
        }
    }
    uintptr_t of_data = 0, of_calls = 0;
    size_t of_data_size = 0, of_calls_size = 0;
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        uintptr_t value = entry->d_un.d_ptr;
        switch (entry->d_tag) {
        case DT_SYMTAB: library.symbols = (const void *)value; break;
        case DT_STRTAB: library.names = (const void *)value; break;
        case DT_RELA: of_data = value; break;
        case DT_RELASZ: of_data_size = value; break;
        case DT_JMPREL: of_calls = value; break;
        case DT_PLTRELSZ: of_calls_size = value; break;
        }
    }
    /* glibc has made addresses of them; a C library that has not is left alone. */
    if ((uintptr_t)library.symbols < library.base || (uintptr_t)library.names < library.base)
        return 0;
    if (of_data >= library.base)
        lead_here(search, &library, (const void *)of_data, of_data_size);
    if (of_calls >= library.base)
        lead_here(search, &library, (const void *)of_calls, of_calls_size);
    return 0;
}

static PyObject *attach(PyObject *module, PyObject *folder) {
    (void)module;
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(folder, &encoded))
        return NULL;
    search_t search = {.folder = PyBytes_AsString(encoded)};
    dl_iterate_phdr(look, &search);
    Py_DECREF(encoded);
    return PyBool_FromLong(search.allocating != 0 && search.freeing != 0 && search.failed == 0);
}

static PyObject *watch(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    thread.watched_count = 0;
    thread.watching = true;
    Py_RETURN_NONE;
}

static PyObject *watched(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    thread.watching = false;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < thread.watched_count; i++) {
        const allocation_t *one = &thread.watched[i];
        PyObject *entry = Py_BuildValue("nK", (Py_ssize_t)one->byte_size, (unsigned long long)(uintptr_t)one->address);
        if (entry == NULL || PyList_Append(list, entry) != 0)
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

static PyObject *offer(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_ssize_t byte_size, skip;
    unsigned long long address;
    if (!PyArg_ParseTuple(arguments, "nnK", &byte_size, &skip, &address))
        return NULL;
    if (byte_size <= 0 || skip < 0 || address == 0)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at %llu after %zd others", byte_size, address, skip);
    if (thread.offer_count == OFFERS)
        return PyErr_Format(PyExc_OverflowError, "%d offers at most", OFFERS);
    thread.offers[thread.offer_count++] = (offer_t){(size_t)byte_size, (size_t)skip, (void *)(uintptr_t)address};
    Py_RETURN_NONE;
}

static PyObject *withdraw(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    thread.offer_count = 0;
    Py_RETURN_NONE;
}

static PyObject *held(PyObject *module, PyObject *address) {
    (void)module;
    void *wanted = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return NULL;
    bool found = false;
    for (size_t i = 0; i < TAKEN && !found; i++)
        found = wanted != NULL && atomic_load(&taken[i]) == wanted;
    return PyBool_FromLong(found);
}

static PyMethodDef methods[] = {
    {"attach", attach, METH_O, "Leads the libraries below a folder here. False: they import no such functions, or it failed."},
    {"watch", watch, METH_NOARGS, "Begins to note this thread's allocations."},
    {"watched", watched, METH_NOARGS, "Ends that; the first of them, in order: byte size and address."},
    {"offer", offer, METH_VARARGS, "Memory for this thread's allocation of that size after so many others of it."},
    {"withdraw", withdraw, METH_NOARGS, "Ends this thread's offers."},
    {"held", held, METH_O, "Whether something that was allocated at an address is not freed."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.workers.native._output_memory", "Memory for XLA's outputs.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__output_memory(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (PyModule_AddStringMacro(module, SOURCES) || PyModule_AddIntMacro(module, OFFERS)))
        Py_CLEAR(module);
    return module;
}
